"""FallbackDecoder: a causal language model of transformers over our paged KV cache.

Legend: T tokens of the step, S rows with logits, C hidden size, V vocabulary.
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
    """A QuantLinear instead of torch.nn.Linear, for inputs [..., K]."""

    def __init__(self, inner: QuantLinear, out_features: int) -> None:
        super().__init__()
        self.inner, self.out_features = inner, out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y_TN = self.inner(x.reshape(-1, x.shape[-1]))
        return y_TN.reshape(*x.shape[:-1], self.out_features)


class FallbackDecoder(Decoder):
    """Body and head of a transformers model, called as two parts of a step."""

    is_sampled = False  # its layers are not ours to choose from (layer_kinds.py)

    def __init__(
        self, config: ModelConfig, model: Any, call: Call, like: torch.Tensor, kernel: str | None
    ) -> None:
        """`model`: transformers' causal language model, whose attention is attached to `call`."""
        layers = [_Layer(PagedAttention(form, kernel)) for form in call.forms]
        super().__init__(
            config, embedding=None, layers=layers, norm=None, head=torch.nn.Identity(), like=like
        )
        self._call = call
        self.model, self.body = model, model.base_model
        # The causal model computes logits from the hidden states that this gives it.
        self._given = _GivenStates()
        self._body_name = model.base_model_prefix

    def products(self) -> Iterator[Product]:
        """Every quantized product; the model takes plain tensors."""
        for module in self.body.modules():
            if isinstance(module, QuantLinear):
                yield from products_of(module, None)

    def forward_tapped(
        self,
        token_ids_T: torch.Tensor,
        step: StepInputs,
        caches: list[Cache],
        taps: tuple[int, ...],
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Hidden states [T, C] after the final norm. There are no taps."""
        self._call.begin(step, caches)
        found = self.body(
            input_ids=token_ids_T[None].long(),
            position_ids=step.positions_T[None].long(),
            use_cache=False,
            return_dict=True,
        )
        return found.last_hidden_state[0], ()

    def logits(self, hidden_SC: torch.Tensor) -> torch.Tensor:
        """Logits [S, V] of hidden states [S, C], with the model's own scaling and caps."""
        self._given.states_1SC = hidden_SC[None]
        setattr(self.model, self._body_name, self._given)
        try:
            ids = torch.zeros(1, len(hidden_SC), dtype=torch.long, device=hidden_SC.device)
            return self.model(input_ids=ids, use_cache=False, return_dict=True).logits[0]
        finally:
            setattr(self.model, self._body_name, self.body)


class _Layer(torch.nn.Module):
    """A layer, as far as the runner asks about it."""

    def __init__(self, attention: PagedAttention) -> None:
        super().__init__()
        self.attention = attention


class _GivenStates(torch.nn.Module):
    """Replaces the model's body and returns known hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.states_1SC: torch.Tensor | None = None

    def forward(self, *arguments: object, **options: object) -> Any:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        return MoeModelOutputWithPast(last_hidden_state=self.states_1SC)
