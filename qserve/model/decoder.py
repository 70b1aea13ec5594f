"""The decoder: embedding, layers, norm, head. Knows a step's tensors, not requests.

Legend: T tokens of the step, S rows whose logits are wanted, C hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from qkernels.attention.cache import PagedKv
from qserve.model.blocks.attention import StepInputs
from qserve.model.blocks.embedding import Embedding
from qserve.model.blocks.layer import Layer
from qserve.model.blocks.linear import Linear, Product, products_of
from qserve.model.blocks.norm import BranchOutput, RmsNorm
from qserve.model.model_config import ModelConfig
from qserve.model.sharing import LinearPart
from qserve.parallel.pipeline import Pipeline


class Decoder(torch.nn.Module):
    """A causal language model over paged keys and values."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: Embedding | None,
        layers: list[Layer],
        norm: RmsNorm | None,
        head: Linear | None,
        logits_divisor: float = 1.0,
        logits_cap: float | None = None,
        pipeline: Pipeline | None = None,
        like: torch.Tensor | None = None,
    ) -> None:
        """`pipeline`: the stages, of which the first alone has embedding, norm and head. `like`: a
        tensor of the dtype and on the device of activations, where no embedding tells them.
        """
        super().__init__()
        self.config, self.pipeline = config, pipeline
        self.register_buffer("like", like)
        self.embedding = embedding
        self.layers = torch.nn.ModuleList(layers)
        self.norm = norm
        self.head = head
        self._sum = RmsNorm(None, 0.0)
        self.logits_divisor, self.logits_cap = logits_divisor, logits_cap
        self.classifier: torch.Tensor | None = None  # [labels, C]; the loader fills it
        # Of linears that ranks share out, by name, ours; the loader fills it.
        self.parts: Mapping[str, LinearPart] = {}

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return (self.like if self.embedding is None else self.embedding.weight).dtype

    @property
    def device(self) -> torch.device:
        return (self.like if self.embedding is None else self.embedding.weight).device

    @property
    def layer_numbers(self) -> range:
        """Of the model's layers, those that are here."""
        if self.pipeline is None:
            return range(len(self.layers))
        return self.pipeline.layers(self.config.num_layers)

    def products(self) -> Iterator[Product]:
        """Every quantized product, and the operation that takes its result."""
        for layer in self.layers:
            yield from layer.attention.products()
            yield from layer.mlp.products()
        if self.head is not None:
            yield from products_of(self.head, None)

    def forward(
        self, token_ids_T: torch.Tensor, step: StepInputs, caches: list[PagedKv]
    ) -> torch.Tensor:
        """Hidden states [T, C] after the final norm; writes the tokens' keys and values.

        A stage that is not the first returns what it passes on.
        """
        if self.pipeline is None:
            return self.forward_tapped(token_ids_T, step, caches, ())[0]
        return self.forward_parts([token_ids_T], [step], caches)

    def forward_parts(
        self,
        token_ids: Sequence[torch.Tensor],
        steps: Sequence[StepInputs],
        caches: list[PagedKv],
        begin: Callable[[StepInputs], None] = lambda step: None,
    ) -> torch.Tensor:
        """The same of a step in parts, each of which a stage computes while others do another.

        Of a model in stages alone. `begin` is called before the layers compute a part.
        """
        ends = []
        if self.pipeline.is_first:
            # Asked for before anything is sent: the last stage need not wait for the first.
            ends = [self._empty(ids) for ids in token_ids]
            coming = [self.pipeline.receive_last(end_TC) for end_TC in ends]
        sent, passed = [], []
        for ids, step in zip(token_ids, steps, strict=True):
            if self.pipeline.is_first:
                x_TC = self.embedding(ids)
            else:
                x_TC = self.pipeline.receive(self._empty(ids))
            begin(step)
            x_TC, residual_TC = self._layers(x_TC, step, caches)
            if residual_TC is not None:
                _, x_TC = self._sum(x_TC, residual_TC, None)
            passed.append(x_TC.contiguous())
            sent.append(self.pipeline.send(passed[-1]))
        for work in sent:
            work.wait()
        if not self.pipeline.is_first:
            return passed[-1]
        for work in coming:
            work.wait()
        return self.norm(torch.cat(ends), None, None)[0]

    def _layers(
        self, x_TC: torch.Tensor, step: StepInputs, caches: list[PagedKv]
    ) -> tuple[BranchOutput, torch.Tensor | None]:
        residual_TC = None
        for layer, cache in zip(self.layers, caches, strict=True):
            x_TC, residual_TC = layer(x_TC, residual_TC, step, cache)
        return x_TC, residual_TC

    def _empty(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        shape = len(token_ids_T), self.config.hidden_size
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def forward_tapped(
        self,
        token_ids_T: torch.Tensor,
        step: StepInputs,
        caches: list[PagedKv],
        taps: tuple[int, ...],
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The same, and the residual stream [T, C] before each of the layers `taps`.

        The number of layers means behind the last, before the norm. A decoder of sample layers,
        which may lack one, gives its last state there: who asks it wants the shapes.
        """
        x_TC, residual_TC = self.embedding(token_ids_T), None
        states: list[torch.Tensor] = []
        for number, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            tapped = states if number in taps else None
            x_TC, residual_TC = layer(x_TC, residual_TC, step, cache, tapped)
        hidden_TC, last_TC = self.norm(x_TC, residual_TC, None)
        found = dict(zip(sorted(n for n in set(taps) if n < len(self.layers)), states, strict=True))
        return hidden_TC, tuple(found.get(tap, last_TC) for tap in taps)

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
