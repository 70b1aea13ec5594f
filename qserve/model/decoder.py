"""The decoder: embedding, layers, norm, head. Knows a step's tensors, not requests.

Legend: T tokens of the step, S rows whose logits are wanted, C hidden size, V vocabulary, N states.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from qserve.model.blocks.attention import StepInputs
from qserve.model.blocks.embedding import Embedding
from qserve.model.blocks.gemma.altup import Streams
from qserve.model.blocks.gemma.layer_inputs import LayerInputs
from qserve.model.blocks.layer import Layer
from qserve.model.blocks.linear import Linear, Product, products_of
from qserve.model.blocks.moe import MoeMlp
from qserve.model.blocks.norm import Norm
from qserve.model.cache_spec import Cache
from qserve.model.model_config import ModelConfig
from qserve.model.sharing import LinearPart
from qserve.parallel.pipeline import Pipeline


class Decoder(torch.nn.Module):
    """A causal language model over paged keys and values, and states."""

    is_sampled = True  # a few of its layers can run without the others

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: Embedding | None,
        layers: list[Layer],
        norm: Norm | None,
        head: Linear | None,
        logits_divisor: float = 1.0,
        logits_factor: float = 1.0,
        logits_cap: float | None = None,
        layer_inputs: LayerInputs | None = None,
        pipeline: Pipeline | None = None,
        like: torch.Tensor | None = None,
    ) -> None:
        """`pipeline`: the stages, of which the first alone has embedding, norm and head. `like`: a
        tensor of the dtype and on the device of activations, where no embedding tells them.
        """
        super().__init__()
        self.config, self.pipeline = config, pipeline
        self.register_buffer("like", like)
        self.embedding, self.layer_inputs = embedding, layer_inputs
        self.layers = torch.nn.ModuleList(layers)
        self.norm = norm
        self.head = head
        self._sum = Norm(None, 0.0)
        self.logits_divisor, self.logits_factor = logits_divisor, logits_factor
        self.logits_cap = logits_cap
        self.streams: Streams | None = None  # of Gemma 3n; its builder fills it
        self.no_graphs = ""  # the reason why CUDA graphs cannot hold its steps; fallback/ fills it
        self.classifier: torch.Tensor | None = None  # [labels, C]; the loader fills it
        # Of linears that ranks share out, by name, ours; the loader fills it.
        self.parts: Mapping[str, LinearPart] = {}

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return (self.like if self.embedding is None else self.embedding).dtype

    @property
    def device(self) -> torch.device:
        return (self.like if self.embedding is None else self.embedding).device

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
            if getattr(layer, "layer_input", None) is not None:
                yield from layer.layer_input.products()
        if self.head is not None:
            yield from products_of(self.head, None)

    def forward(
        self, token_ids_T: torch.Tensor, step: StepInputs, caches: list[Cache]
    ) -> torch.Tensor:
        """Hidden states [T, C] after the final norm; writes the tokens' keys and values.

        A stage that is not the first returns what it passes on.
        """
        if self.pipeline is None:
            return self.forward_tapped(token_ids_T, step, caches, ())[0]
        return self.forward_parts([token_ids_T], [step], caches)[0]

    def forward_parts(
        self,
        token_ids: Sequence[torch.Tensor],
        steps: Sequence[StepInputs],
        caches: list[Cache],
        taps: tuple[int, ...] = (),
        begin: Callable[[StepInputs], None] = lambda step: None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """`forward_tapped` of a step in parts, each of which a stage computes while others do
        another. What is tapped travels beside the hidden states, in the order of the layers, and
        so do rows that later stages add to them.

        Of a model in stages alone. `begin` is called before the layers compute a part.
        """
        pipeline, wanted = self.pipeline, sorted(set(taps))
        own_layers = self.layer_numbers
        owners = [pipeline.stage_of(tap, self.config.num_layers) for tap in wanted]
        num_before = 1 + sum(owner < pipeline.stage for owner in owners)
        ours = [t for t, owner in zip(wanted, owners, strict=True) if owner == pipeline.stage]
        sent, passed = [], []
        ends, coming = [], []  # what the last stage sends to the first
        for ids, step in zip(token_ids, steps, strict=True):
            if pipeline.is_first:
                x_TC, before = self.embedded(ids, step), []
                added = _levels(x_TC, step)
            else:
                num_added = max(0, step.num_levels - own_layers.start)
                x_TC, *before = pipeline.receive(self._empty(num_before + num_added, ids))
                before, added = before[: num_before - 1], before[num_before - 1 :]
            begin(step)
            x_TC, tapped = self._layers(x_TC, step, caches, ours, added)
            states = [x_TC, *before, *tapped, *added[len(own_layers) :]]
            passed.append(torch.stack(states) if len(states) > 1 else x_TC[None].contiguous())
            sent.append(pipeline.send(passed[-1]))
            if pipeline.is_first:
                # Only now: the first launch of a kernel loads it, and CUDA may wait with that for
                # kernels that run. A receive that runs would wait for what is not yet sent.
                ends.append(self._empty(1 + len(wanted), ids))
                coming.append(pipeline.receive_last(ends[-1]))
        for work in sent:
            work.wait()
        if not pipeline.is_first:
            return passed[-1][0], ()
        for work in coming:
            work.wait()
        x_TC, *states = torch.cat(ends, 1)
        found = dict(zip(wanted, states, strict=True))
        return self.norm(x_TC, None, None)[0], tuple(found[tap] for tap in taps)

    def embedded(self, token_ids_T: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """Embeddings of tokens, and of media at their rows."""
        if step.embeds is not None and step.embeds.rows_M is None:
            return step.embeds.values_MC
        x_TC = self.embedding(token_ids_T, step.positions_T)
        if step.embeds is None:
            return x_TC
        return x_TC.index_copy(0, step.embeds.rows_M, step.embeds.values_MC)

    def _layers(
        self,
        x_TC: torch.Tensor,
        step: StepInputs,
        caches: list[Cache],
        taps: Sequence[int],
        added: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the residual stream after the layers of this stage, and before those of `taps`.

        `added`: [T, C] for each of the stage's first layers, added after it.
        """
        residual_TC, first = None, self.layer_numbers.start
        found: dict[int, torch.Tensor] = {}
        for number, (layer, cache) in enumerate(zip(self.layers, caches, strict=True), first):
            tapped: list[torch.Tensor] = []
            wanted = tapped if number in taps else None
            x_TC, residual_TC = layer(x_TC, residual_TC, step, cache, wanted)
            found.update((number, state_TC) for state_TC in tapped)
            if number - first < len(added):
                residual_TC = residual_TC + added[number - first]
        if residual_TC is not None:
            _, x_TC = self._sum(x_TC, residual_TC, None)
        return x_TC, [found.get(tap, x_TC) for tap in taps]

    def _empty(self, count: int, token_ids_T: torch.Tensor) -> torch.Tensor:
        shape = count, len(token_ids_T), self.config.hidden_size
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def forward_tapped(
        self,
        token_ids_T: torch.Tensor,
        step: StepInputs,
        caches: list[Cache],
        taps: tuple[int, ...],
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The same, and the residual stream [T, C] before each of the layers `taps`.

        The number of layers means behind the last, before the norm. A decoder of sample layers,
        which may lack one, gives its last state there: who asks it wants the shapes.
        """
        x_TC, residual_TC = self.embedded(token_ids_T, step), None
        inputs_TLP = None
        if self.layer_inputs is not None:
            inputs_TLP = self.layer_inputs(token_ids_T, x_TC, step.positions_T)
        if self.streams is not None:
            x_TC = self.streams.split(x_TC)
        added = () if step.embeds is None else step.embeds.added_MC
        states: list[torch.Tensor] = []
        for number, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            tapped = states if number in taps else None
            if inputs_TLP is not None:
                step = replace(step, layer_input_TP=inputs_TLP[:, number])
            x_TC, residual_TC = layer(x_TC, residual_TC, step, cache, tapped)
            if number < len(added):
                residual_TC = step.embeds.added_to(residual_TC, number)
        if self.streams is not None:
            x_TC = self.streams.merge(x_TC)
        hidden_TC, last_TC = self.norm(x_TC, residual_TC, None)
        found = dict(zip(sorted(n for n in set(taps) if n < len(self.layers)), states, strict=True))
        return hidden_TC, tuple(found.get(tap, last_TC) for tap in taps)

    def compute_for_others(self) -> None:
        """Take part in a step in which this engine has no tokens, with its experts."""
        x_0C = self._empty(1, torch.empty(0))[0]
        for module in self.layers.modules():
            if isinstance(module, MoeMlp) and module.exchange is not None:
                module.compute_for_others(x_0C)

    def labels(self, hidden_SC: torch.Tensor) -> torch.Tensor:
        """A classifier's logits [S, labels], in float32."""
        return (hidden_SC @ self.classifier.T).float()

    def logits(self, hidden_SC: torch.Tensor) -> torch.Tensor:
        """Logits [S, V] of hidden states [S, C]."""
        logits_SV = self.head(hidden_SC)
        if self.logits_divisor != 1:
            logits_SV = logits_SV / self.logits_divisor
        if self.logits_factor != 1:
            logits_SV = logits_SV * self.logits_factor
        if self.logits_cap is not None:
            logits_SV = self.logits_cap * torch.tanh(logits_SV / self.logits_cap)
        return logits_SV


def _levels(x_TC: torch.Tensor, step: StepInputs) -> list[torch.Tensor]:
    """Return what each of the first layers adds [T, C]: zeros in rows without media."""
    levels = [torch.zeros_like(x_TC) for _ in range(step.num_levels)]
    if step.embeds is not None:
        step.embeds.fill_levels_(levels)
    return levels
