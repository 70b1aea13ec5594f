"""Modules that replace those of transformers, so that each matrix is a linear with hooks.

Legend: T tokens, D hidden size, C choices of a token.
"""

from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from calibrate.layer_map import LayerMap


def with_linears(module: nn.Module) -> nn.Module:
    """Replace GPT-2's Conv1D, whose weight is [inputs, outputs], by linears; returns the module."""
    for name, each in list(module.named_modules()):
        if isinstance(each, Conv1D):
            parent, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(parent), leaf, nn.Linear(each.nx, each.nf))
    return module


class Experts(nn.ModuleList):
    """Expert mixture with one linear per matrix, as checkpoints store it.

    transformers holds all experts in one tensor, where hooks cannot see a linear's input. The
    router and the shared expert stay transformers'. With `all_tokens` an expert also runs the
    tokens that the router did not send it, and drops their outputs.
    """

    def __init__(
        self,
        layer_map: LayerMap,
        config: Any,
        raw_config: dict[str, Any],
        all_tokens: bool = False,
    ) -> None:
        experts = layer_map.experts
        linears = (*experts.gate_up.linears, *experts.down.linears)
        self.names = [linear.name.rpartition(".")[2] for linear in linears]
        inner = layer_map.family.sizes(config.to_dict())[experts.down.inputs]
        outer = config.hidden_size
        shapes = ((outer, inner), (outer, inner), (inner, outer))
        super().__init__(
            nn.ModuleDict(
                {
                    name: nn.Linear(*shape, bias=False)
                    for name, shape in zip(self.names, shapes, strict=True)
                }
            )
            for _ in range(layer_map.num_experts(raw_config))
        )
        self.count = layer_map.num_experts(raw_config)
        # The container is also a module, and iteration would return it after the experts.
        self.activation = ACT2FN[config.hidden_act]
        self.all_tokens = all_tokens

    def forward(
        self, hidden_TD: torch.Tensor, expert_TC: torch.Tensor, share_TC: torch.Tensor
    ) -> torch.Tensor:
        output_TD = torch.zeros_like(hidden_TD)
        for number in range(self.count):
            expert = self[number]
            token_T, choice_T = (expert_TC == number).nonzero(as_tuple=True)
            if len(token_T) == 0 and not self.all_tokens:
                continue
            gate, up, down = (expert[name] for name in self.names)
            seen_TD = hidden_TD if self.all_tokens else hidden_TD[token_T]
            found_TD = down(self.activation(gate(seen_TD)) * up(seen_TD))
            found_TD = found_TD[token_T] if self.all_tokens else found_TD
            share_T1 = share_TC[token_T, choice_T, None].to(found_TD.dtype)
            output_TD.index_add_(0, token_T, found_TD * share_T1)
        return output_TD
