"""The decoder: embedding, layers, norm, head. Knows a step's tensors, not requests.

Legend: T tokens of the step, S rows whose logits are wanted, C hidden size, V vocabulary.
"""

from collections.abc import Iterator

import torch

from qkernels.attention.cache import PagedKv
from qserve.model.blocks.attention import StepInputs
from qserve.model.blocks.embedding import Embedding
from qserve.model.blocks.layer import Layer
from qserve.model.blocks.linear import Linear, Product, products_of
from qserve.model.blocks.norm import RmsNorm
from qserve.model.model_config import ModelConfig


class Decoder(torch.nn.Module):
    """A causal language model over paged keys and values."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: Embedding,
        layers: list[Layer],
        norm: RmsNorm,
        head: Linear,
        logits_divisor: float = 1.0,
        logits_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = embedding
        self.layers = torch.nn.ModuleList(layers)
        self.norm = norm
        self.head = head
        self.logits_divisor, self.logits_cap = logits_divisor, logits_cap
        self.classifier: torch.Tensor | None = None  # [labels, C]; the loader fills it

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return self.embedding.weight.dtype

    def products(self) -> Iterator[Product]:
        """Every quantized product, and the operation that takes its result."""
        for layer in self.layers:
            yield from layer.attention.products()
            yield from layer.mlp.products()
        yield from products_of(self.head, None)

    def forward(
        self, token_ids_T: torch.Tensor, step: StepInputs, caches: list[PagedKv]
    ) -> torch.Tensor:
        """Hidden states [T, C] after the final norm; writes the tokens' keys and values."""
        x_TC, residual_TC = self.embedding(token_ids_T), None
        for layer, cache in zip(self.layers, caches, strict=True):
            x_TC, residual_TC = layer(x_TC, residual_TC, step, cache)
        return self.norm(x_TC, residual_TC, None)[0]

    def labels(self, hidden_SC: torch.Tensor) -> torch.Tensor:
        """A classifier's logits [S, labels], in float32."""
        return (hidden_SC @ self.classifier.T).float()

    def logits(self, hidden_SC: torch.Tensor) -> torch.Tensor:
        """Logits [S, V] of hidden states [S, C]."""
        logits_SV = self.head(hidden_SC)
        if self.logits_divisor != 1:
            logits_SV = logits_SV / self.logits_divisor
        if self.logits_cap is not None:
            logits_SV = self.logits_cap * torch.tanh(logits_SV / self.logits_cap)
        return logits_SV
