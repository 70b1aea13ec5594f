"""Modules that replace transformers' own, so that every matrix is a linear that can have hooks.

Legend: T tokens, D hidden size, C choices of a token.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from calibrate.layer_map import LayerMap
from formats.architecture.experts import MEDIA_ROUTER
from formats.architecture.experts import Experts as ExpertRow
from formats.architecture.family import Family

# modules of transformers' mixture with the experts for text, and with those for tokens of media
MEDIA_MIXTURES = ("text_moe", "vision_moe")
MERGED = "gate_up_proj"  # linear of transformers' feed-forwards that computes gate, then up


def with_media_routers(
    state: Mapping[str, torch.Tensor], experts: ExpertRow
) -> dict[str, torch.Tensor]:
    """Add the routers of both mixtures of a layer under transformers' names."""
    found, correction = dict(state), f"{experts.module}.{experts.routing.correction}"
    for place, (name, leaf) in enumerate(
        zip(MEDIA_MIXTURES, ("weight", MEDIA_ROUTER), strict=True)
    ):
        gate, stored = f"{experts.module}.{name}.gate", f"{experts.router}.{leaf}"
        if stored in state:
            found[f"{gate}.weight"] = state[stored].T.contiguous()
        if correction in state:
            found[f"{gate}.{experts.routing.correction}"] = state[correction][place : place + 1]
    return found


def with_linears(module: nn.Module) -> nn.Module:
    """Replace GPT-2's Conv1D (weight [inputs, outputs]) by linears, in place; return the module."""
    for name, each in list(module.named_modules()):
        if isinstance(each, Conv1D):
            parent, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(parent), leaf, nn.Linear(each.nx, each.nf))
    return module


def with_gate_and_up(module: nn.Module, family: Family) -> nn.Module:
    """Divide merged linears `gate_up_proj` that files have as two, in place; return the module."""
    names = [linear.name.rpartition(".")[2] for linear in family.gate_up.linears]
    if names != ["gate_proj", "up_proj"]:
        return module
    for each in list(module.modules()):
        merged = getattr(each, MERGED, None)
        if isinstance(merged, nn.Linear):
            delattr(each, MERGED)
            for name in names:
                half = nn.Linear(merged.in_features, merged.out_features // 2, bias=False)
                setattr(each, name, half)
            # not a module, so that the state has only the halves
            object.__setattr__(each, MERGED, GateAndUp(each))
    return module


class GateAndUp:
    """Both halves of a merged linear of `mlp`."""

    def __init__(self, mlp: nn.Module) -> None:
        self.mlp = mlp

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.mlp.gate_proj(x), self.mlp.up_proj(x)], -1)


class Experts(nn.ModuleList):
    """Routed experts with one linear per matrix, as checkpoints store them.

    transformers holds all experts in one tensor, where hooks cannot see a linear's input. The
    router and the shared expert remain transformers' modules. With `all_tokens` every expert runs
    on all tokens, and the outputs of tokens that were not routed to it are dropped.
    """

    def __init__(
        self,
        layer_map: LayerMap,
        config: Any,
        raw_config: dict[str, Any],
        layer: int,
        all_tokens: bool = False,
        of_media: bool = False,
    ) -> None:
        """`of_media`: the experts for tokens of media, in families that have such experts."""
        row, experts = layer_map.family, layer_map.experts
        linears = (*experts.gate_up.linears, *experts.down.linears)
        self.names = [linear.name.rpartition(".")[2] for linear in linears]
        self.gated = experts.gated
        # alpha and limit of the activation; None: it has none
        self.clamp = experts.alpha_and_limit(raw_config) if experts.clamped else None
        sizes = layer_map.family.sizes(config.to_dict())
        inner = sizes[experts.media_inner if of_media else experts.down.inputs]
        outer = sizes[experts.gate_up.inputs]
        count = layer_map.num_experts(raw_config)
        count = count // 2 if experts.media_inner else count
        shapes = (*((outer, inner) for _ in experts.gate_up.linears), (inner, outer))
        super().__init__(
            nn.ModuleDict(
                {
                    name: nn.Linear(*shape, bias=False)
                    for name, shape in zip(self.names, shapes, strict=True)
                }
            )
            for _ in range(count)
        )
        self.count = count
        # The activation is also a submodule, so len(self) and iteration would include it.
        self.activation = ACT2FN[getattr(config, row.activation_key or "-", row.activations[0])]
        self.all_tokens = all_tokens
        limits = raw_config.get(experts.limits_key) or []
        self.limit = limits[layer] or None if layer < len(limits) else None
        self.limits_gates = experts.limits_gates

    def forward(
        self, hidden_TD: torch.Tensor, expert_TC: torch.Tensor, share_TC: torch.Tensor
    ) -> torch.Tensor:
        output_TD = torch.zeros_like(hidden_TD)
        for number in range(self.count):
            expert = self[number]
            token_T, choice_T = (expert_TC == number).nonzero(as_tuple=True)
            if len(token_T) == 0 and not self.all_tokens:
                continue
            *first, down = (expert[name] for name in self.names)
            seen_TD = hidden_TD if self.all_tokens else hidden_TD[token_T]
            found_TD = down(self._activated([linear(seen_TD) for linear in first]))
            found_TD = found_TD[token_T] if self.all_tokens else found_TD
            share_T1 = share_TC[token_T, choice_T, None].to(found_TD.dtype)
            output_TD.index_add_(0, token_T, found_TD * share_T1)
        return output_TD

    def _activated(self, made: list[torch.Tensor]) -> torch.Tensor:
        """Return the input of `down` from gate and up, or from up."""
        if self.clamp is not None:
            alpha, limit = self.clamp
            gate, up = made[0].clamp(max=limit), made[1].clamp(-limit, limit)
            return (up + 1) * gate * torch.sigmoid(alpha * gate)
        if self.limit is None:
            inner_TI = self.activation(made[0])
            return inner_TI * made[1] if self.gated else inner_TI
        gate, up = made[0], made[1].clamp(-self.limit, self.limit)
        if self.limits_gates:
            return self.activation(gate.clamp(max=self.limit)) * up
        return self.activation(gate).clamp(max=self.limit) * up


class AlwaysActive:
    """Inkling's shared experts: the last of a mixture's experts, which every token uses."""

    def __init__(self, mixture: nn.Module) -> None:
        """`mixture`: transformers' module with `Experts` in it."""
        self.mixture = mixture

    def replace(self) -> None:
        """Put this object in the place of the mixture's module."""
        self.mixture.__delattr__("shared_experts")
        # not a module, so that the state has each expert once
        object.__setattr__(self.mixture, "shared_experts", self)

    def __call__(self, hidden_BSD: torch.Tensor, gammas: torch.Tensor) -> torch.Tensor:
        """Return the sum of the experts' outputs. `gammas`: weights of each expert."""
        hidden_TD, experts = hidden_BSD.flatten(0, -2), self.mixture.experts
        share_TC = gammas.reshape(len(hidden_TD), -1)
        first = experts.count - share_TC.shape[1]
        numbers_C = torch.arange(first, experts.count, device=hidden_TD.device)
        return experts(hidden_TD, numbers_C.expand_as(share_TC), share_TC).view_as(hidden_BSD)


class ScaledMixture(nn.Module):
    """Llama 4's mixture of experts: a token's only expert reads input times routing weight."""

    def __init__(self, mixture: nn.Module) -> None:
        """`mixture`: transformers' module with `Experts` in it."""
        super().__init__()
        self.experts, self.router = mixture.experts, mixture.router
        self.shared_expert = mixture.shared_expert

    def forward(self, hidden_BSD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_TD = hidden_BSD.flatten(0, -2)
        scores_TE, logits_TE = self.router(hidden_TD)
        share_T1, expert_T1 = scores_TE.max(-1, keepdim=True)
        routed_TD = self.experts(hidden_TD * share_T1, expert_T1, torch.ones_like(share_T1))
        return self.shared_expert(hidden_TD) + routed_TD, logits_TE
