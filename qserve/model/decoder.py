"""Decoder: embedding, layers, final norm and head. It works on a step's tensors, not on requests.

T: tokens of the step. S: rows with logits. C: hidden size. V: vocabulary size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from qserve.model.blocks.attention import StepInputs
from qserve.model.blocks.classifier import Classifier, RankerHead
from qserve.model.blocks.compressed.hyper import HyperStreams
from qserve.model.blocks.embedding import Embedding
from qserve.model.blocks.gemma.altup import Streams
from qserve.model.blocks.gemma.layer_inputs import LayerInputs
from qserve.model.blocks.layer import Layer
from qserve.model.blocks.linear import Linear, Product, products_of
from qserve.model.blocks.moe import MoeMlp
from qserve.model.blocks.norm import Norm
from qserve.model.cache_spec import Cache
from qserve.model.model_config import ModelConfig
from qserve.model.tp_plan import LinearPart
from qserve.parallel.pipeline import Pipeline


class Decoder(torch.nn.Module):
    """A causal language model over KV pages and recurrent states."""

    is_sampled = True  # a sample of its layers can run without the other layers

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
        """`pipeline`: the stages; only the first has embedding, norm and head. `like`: a tensor
        with the dtype and device of activations, needed if there is no embedding.
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
        self.streams: Streams | HyperStreams | None = None  # set by the builders of such families
        self.reads_tokens = False  # layers read token ids; set by the builders of such families
        self.num_tokens: int | None = None  # later logits are of no tokens; None: all are
        self.no_graphs = ""  # reason why steps cannot run in CUDA graphs; set by builders
        self.classifier: Classifier | RankerHead | None = None  # set by the loader
        # name of a sharded linear -> this rank's shard; set by the loader
        self.parts: Mapping[str, LinearPart] = {}
        # name of a linear of a layer -> the Linear that runs it; set by the loader
        self.linears: Mapping[str, Linear] = {}
        # layer -> numbers of the routed experts on this rank; set by the loader
        self.local_experts: Mapping[int, tuple[int, ...]] = {}

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations."""
        return (self.like if self.embedding is None else self.embedding).dtype

    @property
    def device(self) -> torch.device:
        return (self.like if self.embedding is None else self.embedding).device

    @property
    def layer_numbers(self) -> range:
        """Numbers of the model's layers that this rank has."""
        if self.pipeline is None:
            return range(len(self.layers))
        return self.pipeline.layers(self.config.num_layers)

    def products(self) -> Iterator[Product]:
        """Yield all quantized products, each with the operation that consumes its result."""
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
        """Write the tokens' keys and values; return hidden states [T, C] after the final norm.

        A pipeline stage other than the first returns the hidden states that it sends on.
        """
        if self.pipeline is None:
            return self.forward_with_aux(token_ids_T, step, caches, ())[0]
        return self.forward_parts([token_ids_T], [step], caches)[0]

    def forward_parts(
        self,
        token_ids: Sequence[torch.Tensor],
        steps: Sequence[StepInputs],
        caches: list[Cache],
        aux_layers: tuple[int, ...] = (),
        begin: Callable[[StepInputs], None] = lambda step: None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Run `forward_with_aux` in microbatches over pipeline stages.

        Stages compute different microbatches at the same time. Auxiliary hidden states, in the
        order of the layers, and rows that later stages add are sent along with the hidden states.
        Only for models with pipeline stages. `begin` is called before the layers compute each
        microbatch.
        """
        pipeline, wanted = self.pipeline, sorted(set(aux_layers))
        own_layers = self.layer_numbers
        owners = [pipeline.stage_of(layer, self.config.num_layers) for layer in wanted]
        num_before = 1 + sum(owner < pipeline.stage for owner in owners)
        ours = [t for t, owner in zip(wanted, owners, strict=True) if owner == pipeline.stage]
        sent, passed = [], []
        ends, coming = [], []  # tensors that the last stage sends to the first, and receives
        for ids, step in zip(token_ids, steps, strict=True):
            if pipeline.is_first:
                x_TC, before = self.embedded(ids, step), []
                added = _levels(x_TC, step)
            else:
                num_added = max(0, step.num_levels - own_layers.start)
                x_TC, *before = pipeline.receive(self._empty(num_before + num_added, ids))
                before, added = before[: num_before - 1], before[num_before - 1 :]
            begin(step)
            x_TC, aux_states = self._layers(x_TC, step, caches, ours, added)
            states = [x_TC, *before, *aux_states, *added[len(own_layers) :]]
            passed.append(torch.stack(states) if len(states) > 1 else x_TC[None].contiguous())
            sent.append(pipeline.send(passed[-1]))
            if pipeline.is_first:
                # The receive must start after the launches: the first launch of a kernel loads it,
                # and CUDA may delay that until running kernels end. A running receive would wait
                # for a tensor that has not been sent yet.
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
        return self.norm(x_TC, None, None)[0], tuple(found[layer] for layer in aux_layers)

    def embedded(self, token_ids_T: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """Return token embeddings, with media embeddings in their rows."""
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
        aux_layers: Sequence[int],
        added: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the residual stream after this stage's layers and before each of `aux_layers`.

        `added`: [T, C] for each of the stage's first layers, to add after the layer.
        """
        residual_TC, first = None, self.layer_numbers.start
        found: dict[int, torch.Tensor] = {}
        for number, (layer, cache) in enumerate(zip(self.layers, caches, strict=True), first):
            aux_states: list[torch.Tensor] = []
            wanted = aux_states if number in aux_layers else None
            x_TC, residual_TC = layer(x_TC, residual_TC, step, cache, wanted)
            found.update((number, state_TC) for state_TC in aux_states)
            if number - first < len(added):
                residual_TC = residual_TC + added[number - first]
        if residual_TC is not None:
            _, x_TC = self._sum(x_TC, residual_TC, None)
        return x_TC, [found.get(layer, x_TC) for layer in aux_layers]

    def _empty(self, count: int, token_ids_T: torch.Tensor) -> torch.Tensor:
        shape = count, len(token_ids_T), self.config.hidden_size
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def forward_with_aux(
        self,
        token_ids_T: torch.Tensor,
        step: StepInputs,
        caches: list[Cache],
        aux_layers: tuple[int, ...],
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return the result of `forward`, and the residual stream [T, C] before `aux_layers`.

        `num_layers` in `aux_layers` means the residual stream after the last layer, before the
        norm. A decoder with a sample of the layers returns its last state for a layer that it
        lacks: its callers need only the shapes.
        """
        x_TC, residual_TC = self.embedded(token_ids_T, step), None
        inputs_TLP = None
        if self.layer_inputs is not None:
            inputs_TLP = self.layer_inputs(token_ids_T, x_TC, step.positions_T)
        if self.reads_tokens:
            step = replace(step, token_ids_T=token_ids_T)
        if self.streams is not None:
            x_TC = self.streams.split(x_TC)
        added = () if step.embeds is None else step.embeds.added_MC
        states: list[torch.Tensor] = []
        for number, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            aux_states = states if number in aux_layers else None
            if inputs_TLP is not None:
                step = replace(step, layer_input_TP=inputs_TLP[:, number])
            x_TC, residual_TC = layer(x_TC, residual_TC, step, cache, aux_states)
            if number < len(added):
                residual_TC = step.embeds.added_to(residual_TC, number)
        if self.streams is not None:
            x_TC = self.streams.merge(x_TC)
        hidden_TC, last_TC = self.norm(x_TC, residual_TC, None)
        numbers = sorted(n for n in set(aux_layers) if n < len(self.layers))
        found = dict(zip(numbers, states, strict=True))
        return hidden_TC, tuple(found.get(layer, last_TC) for layer in aux_layers)

    def compute_for_others(self) -> None:
        """Compute this engine's experts for a step in which the engine has no tokens."""
        x_0C = self._empty(1, torch.empty(0))[0]
        for module in self.layers.modules():
            if isinstance(module, MoeMlp) and module.exchange is not None:
                module.compute_for_others(x_0C)

    def labels(self, hidden_SC: torch.Tensor) -> torch.Tensor:
        """Return a classifier's logits [S, labels] in float32."""
        return self.classifier(hidden_SC)

    def logits(self, hidden_SC: torch.Tensor) -> torch.Tensor:
        """Return logits [S, V] of hidden states [S, C]."""
        logits_SV = self.head(hidden_SC)
        if self.logits_divisor != 1:
            logits_SV = logits_SV / self.logits_divisor
        if self.logits_factor != 1:
            logits_SV = logits_SV * self.logits_factor
        if self.logits_cap is not None:
            logits_SV = self.logits_cap * torch.tanh(logits_SV / self.logits_cap)
        if self.num_tokens is not None:
            logits_SV[:, self.num_tokens :] = float("-inf")
        return logits_SV


def _levels(x_TC: torch.Tensor, step: StepInputs) -> list[torch.Tensor]:
    """Return the values [T, C] that each of the first layers adds; zeros in rows without media."""
    levels = [torch.zeros_like(x_TC) for _ in range(step.num_levels)]
    if step.embeds is not None:
        step.embeds.fill_levels_(levels)
    return levels
