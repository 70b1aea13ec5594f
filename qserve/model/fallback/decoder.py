"""FallbackDecoder: a causal language model of transformers over this project's paged KV cache.

T: tokens of the step. S: rows with logits. C: hidden size. V: vocabulary size.
"""

from collections.abc import Iterator
from typing import Any

import torch

from qkernels import QuantLinear
from qserve.model.blocks.attention import StepInputs
from qserve.model.blocks.linear import Product, products_of
from qserve.model.cache_spec import Cache
from qserve.model.decoder import Decoder
from qserve.model.fallback.attention import Call, PagedAttention
from qserve.model.model_config import ModelConfig


class QuantizedLinear(torch.nn.Module):
    """A QuantLinear that replaces a torch.nn.Linear. Takes inputs [..., K]."""

    def __init__(self, inner: QuantLinear, out_features: int) -> None:
        super().__init__()
        self.inner, self.out_features = inner, out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y_TN = self.inner(x.reshape(-1, x.shape[-1]))
        return y_TN.reshape(*x.shape[:-1], self.out_features)


class FallbackDecoder(Decoder):
    """A transformers model whose body and head are called separately in a step."""

    is_sampled = False  # its layers cannot run separately (layer_kinds.py)

    def __init__(
        self, config: ModelConfig, model: Any, call: Call, like: torch.Tensor, kernel: str | None
    ) -> None:
        """`model`: causal language model of transformers; its attention is attached to `call`."""
        layers = [_Layer(PagedAttention(form, kernel)) for form in call.forms]
        super().__init__(
            config, embedding=None, layers=layers, norm=None, head=torch.nn.Identity(), like=like
        )
        self._call = call
        self.model, self.body = model, model.base_model
        # Replaces the body while `logits` runs the model on known hidden states.
        self._given = _GivenStates()
        self._body_name = model.base_model_prefix

    def products(self) -> Iterator[Product]:
        """Yield all quantized products, without consumers, because the model reads tensors."""
        for module in self.body.modules():
            if isinstance(module, QuantLinear):
                yield from products_of(module, None)

    def forward_with_aux(
        self,
        token_ids_T: torch.Tensor,
        step: StepInputs,
        caches: list[Cache],
        aux_layers: tuple[int, ...],
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return hidden states [T, C] after the final norm, and () since aux_layers is ignored."""
        self._call.begin(step, caches)
        found = self.body(
            input_ids=token_ids_T[None].long(),
            position_ids=step.positions_T[None].long(),
            use_cache=False,
            return_dict=True,
        )
        return found.last_hidden_state[0], ()

    def logits(self, hidden_SC: torch.Tensor) -> torch.Tensor:
        """Return logits [S, V] of hidden states [S, C], with the model's own scaling and caps."""
        self._given.states_1SC = hidden_SC[None]
        setattr(self.model, self._body_name, self._given)
        try:
            ids = torch.zeros(1, len(hidden_SC), dtype=torch.long, device=hidden_SC.device)
            return self.model(input_ids=ids, use_cache=False, return_dict=True).logits[0]
        finally:
            setattr(self.model, self._body_name, self.body)


class _Layer(torch.nn.Module):
    """The attributes of a layer that the runner reads."""

    def __init__(self, attention: PagedAttention) -> None:
        super().__init__()
        self.attention = attention


class _GivenStates(torch.nn.Module):
    """Replacement for the model's body that returns known hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.states_1SC: torch.Tensor | None = None

    def forward(self, *arguments: object, **options: object) -> Any:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        return MoeModelOutputWithPast(last_hidden_state=self.states_1SC)
