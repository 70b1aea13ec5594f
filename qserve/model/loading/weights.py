"""Weights: a model's weights in the form that its builder needs: on the device, merged, prepared.

All names and shapes come from the family's row.
N: outputs. K: inputs. C: hidden size. V: vocabulary size.
"""

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from tqdm import tqdm

from formats.architecture.bare_model import RANKER, RANKER_TENSORS, SCORE, SCORE_OFFSET
from formats.architecture.projection import Shape
from formats.architecture.sizes import size
from formats.errors import CheckpointError, InputError
from formats.in_memory.k_weight import KWeight
from formats.in_memory.slices import take_outputs
from formats.in_memory.weights import Weight, merge
from formats.numerics.sinusoids import sinusoids
from formats.scheme import Scheme
from formats.weight_digest import rounded
from qkernels import QuantLinear
from qkernels.choice import FIXED_ORDER
from qkernels.wna16.layout import kernel_bits
from qserve.model.blocks.classifier import Classifier, RankerHead
from qserve.model.blocks.embedding import Embedding, PackedTable, VocabularyPart
from qserve.model.blocks.gemma.altup import Streams
from qserve.model.blocks.gemma.layer_inputs import LayerInputs
from qserve.model.blocks.linear import (
    FloatLinear,
    GatheredLinear,
    Linear,
    SplitLinear,
)
from qserve.model.blocks.norm import Norm
from qserve.model.blocks.rotary import Rotary
from qserve.model.loading.dummy_source import DummySource
from qserve.model.loading.expert_weights import not_read_ahead
from qserve.model.loading.head_scheme import FLAG as HEAD_FLAG
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weight_source import WeightSource
from qserve.model.model_config import ModelConfig
from qserve.model.rope import RopeConfig, cos_sin_table
from qserve.model.tp_plan import WHOLE, LinearPart, LinearShard, TpPlan
from qserve.parallel.pipeline import Pipeline

logger = logging.getLogger(__name__)

Source = WeightSource | DummySource
AnyLayer = TypeVar("AnyLayer", bound=torch.nn.Module)


class Weights:
    """Creates tensors and linears from a checkpoint or from random weights. Call `audit` last."""

    def __init__(
        self,
        config: ModelConfig,
        source: Source,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_model_len: int,
        progress: bool = True,
        kernels: Mapping[str, str] | None = None,
        tp_plan: TpPlan | None = None,
        pipeline: Pipeline | None = None,
        on_layer: Callable[[torch.nn.Module], None] | None = None,
    ) -> None:
        """`kernels`: operation -> selected and excluded kernels (EngineConfig).

        `tp_plan`: this rank's shard of each layer; None: whole layers. `pipeline`: this rank's
        stage; None: all layers. `on_layer`: called with each finished layer.
        """
        self._on_layer = on_layer
        self.kernels, self.pipeline = kernels or {}, pipeline
        # Name of a linear -> its shard. Filled as linears are created, if the model is sharded.
        self.parts: dict[str, LinearPart] = {}
        # Name of a linear of a layer -> the Linear that runs it. Filled as linears are created.
        self.linears: dict[str, Linear] = {}
        # Layer -> numbers of the routed experts on this rank. Filled as layers are created.
        self.local_experts: dict[int, tuple[int, ...]] = {}
        # Names of linears of experts on other ranks. Filled as layers are created.
        self.elsewhere: set[str] = set()
        self.tp_plan = tp_plan or TpPlan(config)
        self.config, self.family, self.source = config, config.family, source
        self._sizes = config.sizes
        self.device, self.dtype, self.max_model_len = device, dtype, max_model_len
        self._progress = progress
        self._rotaries: list[tuple[RopeConfig | None, Rotary]] = []

    @property
    def has_ends(self) -> bool:
        """True if this stage has embedding, last norm and head."""
        return self.pipeline is None or self.pipeline.is_first

    def embedding(
        self, name: str | None = None, shape: tuple[int, ...] | None = None
    ) -> torch.Tensor | PackedTable:
        """Return the token embedding [V, C]; in a sharded model, this rank's rows.

        `name`, `shape`: name and shape of another table than the model's.
        """
        name = name or self.family.embedding
        shape = shape or self.shape(self.family.model_tensors[self.family.embedding])
        module, part = name.removesuffix(".weight"), self._rows_of_table(shape[0])
        if self.source.is_quantized(module):
            weight = self._without_activation(self.source.weight(module, shape))
            if part is not None:
                weight = take_outputs(weight, ((part.start, part.stop),))
            return PackedTable(weight.to(self.device), self.dtype)
        table_VC = self.tensor(name, shape)
        return table_VC if part is None else table_VC[part.start : part.stop].clone()

    @property
    def vocabulary(self) -> VocabularyPart | None:
        """The token ids whose rows this rank has; None: all."""
        return self._rows_of_table(self.config.vocab_size)

    def _rows_of_table(self, num_tokens: int) -> VocabularyPart | None:
        if self.tp_plan.is_whole:
            return None
        shards = self.tp_plan.vocabulary(num_tokens)
        return VocabularyPart(communicator=self.tp_plan.communicator, shards=shards)

    def last_norm(self) -> Norm:
        """Return the norm before the head."""
        family, shape = self.family, (self.config.hidden_size,)
        bias = self.tensor(family.last_norm_bias, shape) if family.norm_bias else None
        weight = self.norm(family.last_norm, shape)
        return Norm(weight, self.config.norm_eps, family.norm_kind, bias)

    def embedding_norm(self) -> Norm | None:
        """Return the norm of embeddings; None if the model has none."""
        family, shape = self.family, (self.config.hidden_size,)
        if family.plain_embedding_norm:
            weight = torch.ones(shape, dtype=self.dtype, device=self.device)
            return Norm(weight, self.config.norm_eps)
        if not family.embedding_norm:
            return None
        bias = self.tensor(family.embedding_norm_bias, shape) if family.norm_bias else None
        weight = self.norm(family.embedding_norm, shape)
        return Norm(weight, self.config.norm_eps, family.norm_kind, bias)

    def positions(self) -> torch.Tensor | None:
        """Return the position embeddings [positions, C] to add; None if the model has none."""
        row = self.family.positions
        if row is None:
            return None
        shape = self.shape((("positions",), ("hidden_size",)))
        if row.name:
            return self.tensor(row.name, shape)[row.offset :]
        table_PC = sinusoids(*shape, zero_row=self.config.values.get("pad_token_id"))
        return table_PC[row.offset :].to(self.device, self.dtype)

    def layer_inputs(self) -> LayerInputs | None:
        """Return the block that computes per-layer inputs; None if the model has none."""
        row, config = self.family.layer_inputs, self.config
        if row is None:
            return None
        width, shapes = config.values[row.width_key], row.tensors
        shape_of_table = self.shape(shapes[row.table])
        table = self.embedding(row.table, shape_of_table)
        projection = f"{row.model_projection}.weight"
        weight = self.tensor(projection, self.shape(shapes[projection]))
        norm = Norm(self.norm(row.model_norm, (width,)), config.norm_eps, self.family.norm_kind)
        num_tokens = config.values["vocab_size_per_layer_input"]
        return LayerInputs(
            table=Embedding(table, width**0.5, self._rows_of_table(shape_of_table[0])),
            projection=self.float_linear(weight),
            norm=norm,
            num_tokens=num_tokens if num_tokens < config.vocab_size else None,
        )

    def streams(self) -> Streams:
        """Return the block that splits and merges streams, for models with several streams."""
        names = self.family.stream_linears
        shape = (self.config.hidden_size,) * 2
        matrices = [self.tensor(f"{name}.weight", shape) for name in names]
        return Streams(matrices[: len(matrices) // 2], matrices[len(matrices) // 2 :])

    def merge_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that merge streams, in float32, by the block's names."""
        return {
            key: self.source.tensor(name, self.shape(shape)).to(self.device, torch.float32)
            for key, (name, shape) in self.family.merge_tensors.items()
        }

    def head(self, embedding: torch.Tensor | PackedTable) -> Linear:
        """Return the LM head: a separate matrix, or the embedding table.

        With a `head_scheme` it is rounded. Raises InputError if it is quantized already.
        """
        name = self.family.head.removesuffix(".weight")
        if not self.config.tied_head or self.source.is_quantized(name):
            head = self._output_matrix(name)
        elif isinstance(embedding, PackedTable):
            head = self._quantized(embedding.packed, None)
        else:
            head = self.float_linear(embedding)
        if self.config.head_scheme is not None:
            head = self._rounded_head(head, self.config.head_scheme)
        return self._gathered(head)

    def _rounded_head(self, head: Linear, scheme: Scheme) -> QuantLinear:
        if not isinstance(head, FloatLinear):
            raise InputError(HEAD_FLAG, "the head is quantized already", "remove the flag")
        return self._quantized(rounded(head.weight, scheme, self.family.head), head.bias)

    def output_matrix(self, name: str) -> Linear:
        """Return a linear from hidden states to logits of the whole vocabulary."""
        return self._gathered(self._output_matrix(name))

    def _output_matrix(self, name: str) -> Linear:
        """Return the linear with this rank's logits."""
        part = self.vocabulary
        cut = WHOLE if part is None else LinearShard(rows=((part.start, part.stop),))
        sizes = [self.config.vocab_size], self.config.hidden_size
        return self.linear([name], *sizes, bias=self.family.head_bias, cuts=[cut])

    def _gathered(self, head: Linear) -> Linear:
        part = self.vocabulary
        return head if part is None else GatheredLinear(head, part.communicator, part.widths)

    def classifier(self) -> Classifier | RankerHead | None:
        """Return the classifier or the ranker; None if the checkpoint has none."""
        C, instead = self.config.hidden_size, self.config.instead_of_head
        if instead == SCORE and self.has_ends:
            return Classifier(self.tensor(SCORE, (len(self.config.labels), C)))
        if instead != RANKER or not self.has_ends:
            return None
        shapes = ((C, C), (C,), (1, C), (1,))
        found = [
            self.tensor(name, shape) for name, shape in zip(RANKER_TENSORS, shapes, strict=True)
        ]
        offset = self.config.values[SCORE_OFFSET]
        return RankerHead((found[0], found[1]), (found[2], found[3]), offset)

    def layers(self) -> Generator[LayerWeights, None, None]:
        """Yield the weights of each layer in turn."""
        numbers = self._layer_numbers
        hidden = None if self._progress else True  # None: shown only on terminals
        with tqdm(numbers, desc="Loading layers", disable=hidden) as bar:
            for number in bar:
                # In a sharded model the first layer shows which rows of later layers are needed,
                # so reading ahead starts after it.
                last = number + (self.tp_plan.is_whole or number > numbers[0])
                for next_number in range(number, last + 1):
                    if next_number in numbers:
                        prefix = self.family.layer.format(i=next_number)
                        self.source.expect(prefix, self.not_ahead(next_number))
                yield self.layer(number)

    def not_ahead(self, number: int) -> set[str]:
        """Return the tensors and linears of a layer that this rank does not read ahead."""
        prefix = self.family.layer.format(i=number)
        return not_read_ahead(self, prefix, self.tp_plan.experts(number))

    def finished(self, layer: AnyLayer) -> AnyLayer:
        """Report a finished layer to `on_layer`, and return the layer."""
        if self._on_layer is not None:
            self._on_layer(layer)
        return layer

    def layer(self, number: int) -> LayerWeights:
        """Return the weights of one layer."""
        return LayerWeights(self, number)

    def rotary(self, rope: RopeConfig | None) -> Rotary:
        """Return the rotary table for all positions. Layers with equal ropes share one table.

        `rope`: None: no channel is rotated.
        """
        for known, rotary in self._rotaries:
            if known == rope:
                return rotary
        if rope is None:
            rotary = Rotary(torch.empty(self.max_model_len, 0, device=self.device))
        else:
            table = cos_sin_table(rope, self.max_model_len, self.device)
            rotary = Rotary(table, rope.interleaved)
        self._rotaries.append((rope, rotary))
        return rotary

    def tensor(
        self, name: str, shape: tuple[int, ...], rows: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return a float tensor, or some of its rows.

        Raises CheckpointError if it is missing or has another shape.
        """
        return self.source.tensor(name, shape, rows).to(self.device, self.dtype)

    def norm(self, name: str, shape: tuple[int, ...], offset: float | None = None) -> torch.Tensor:
        """Return the weight of a norm. Some families store the weight minus 1; then 1 is added.

        `offset`: what is added instead; None: the family's.

        The dtype is float32 for families that round only after the product (ops.NormSpec).
        """
        if not self.family.norm_weights:
            return torch.ones(shape, dtype=self.dtype, device=self.device)
        stored = self.source.tensor(name, shape).to(self.device, torch.float32)
        dtype = torch.float32 if self.family.float32_norms else self.dtype
        return (stored + (self.family.norm_offset if offset is None else offset)).to(dtype)

    def linear(
        self,
        names: Sequence[str],
        outs: Sequence[int],
        ins: int,
        *,
        bias: bool = False,
        cuts: Sequence[LinearShard] | None = None,
    ) -> Linear:
        """Create one layer from several linears whose outputs are concatenated.

        `outs`: number of outputs of each linear. `ins`: number of inputs. `cuts`: shard of each
        linear. Linears that are quantized differently stay separate. Raises CheckpointError if only
        some are quantized although the configuration does not say so.
        """
        members = [
            _Member(name=name, shape=(n, ins), has_bias=bias, cut=cut)
            for name, n, cut in zip(names, outs, cuts or [WHOLE] * len(names), strict=True)
        ]
        quantized = {name for name in names if self.source.is_quantized(name)}
        rest = [name for name in names if name not in quantized]
        if not quantized:
            weights = [self._float(member) for member in members]
            return self.float_linear(torch.cat(weights), self._biases(members), tuple(names))
        if not all(self.source.stays_in_float(name) for name in rest):
            raise CheckpointError(
                ", ".join(names),
                f"run as one matrix, but only {', '.join(sorted(quantized))} is quantized",
                "quantize all of them, or none",
            )
        if not rest:
            layers = [
                self._quantized(weight, self._biases(run)) for weight, run in self._runs(members)
            ]
            return layers[0] if len(layers) == 1 else SplitLinear(layers)
        layers = []
        for member in members:
            own_bias = self._biases([member])
            if member.name in quantized:
                layers.append(self._quantized(self._coded(member), own_bias))
            else:
                layers.append(self.float_linear(self._float(member), own_bias, (member.name,)))
        return SplitLinear(layers)

    def _runs(self, members: "Sequence[_Member]") -> "list[tuple[Weight, list[_Member]]]":
        """Merge the members' weights into one if possible. Returns (weight, its members).

        Otherwise only adjacent k-quant weights with equal specs are merged.
        """
        parts = [self._coded(member) for member in members]
        if len(parts) == 1:
            return [(parts[0], list(members))]
        try:
            return [(merge(parts, members[0].name), list(members))]
        except CheckpointError as error:
            names = ", ".join(member.name for member in members)
            logger.info("%s are not merged into one matrix: %s", names, error.problem)
        runs: list[tuple[Weight, list[_Member]]] = []
        for weight, member in zip(parts, members, strict=True):
            before, run = runs[-1] if runs else (None, [])
            if (
                isinstance(weight, KWeight)
                and isinstance(before, KWeight)
                and (before.spec == weight.spec)
            ):
                runs[-1] = merge([before, weight], member.name), [*run, member]
            else:
                runs.append((weight, [member]))
        return runs

    def _coded(self, member: "_Member") -> Weight:
        ranges = member.cut.ranges
        if ranges is not None:
            weight = self.source.weight_rows(member.name, member.shape, ranges)
            if weight is not None:
                return weight
        weight = self.source.weight(member.name, member.shape)
        return member.cut.weight(weight, member.name)

    def _float(self, member: "_Member") -> torch.Tensor:
        ranges = member.cut.ranges
        if ranges is not None:
            found = self.source.float_rows(member.name, member.shape, ranges)
            if found is not None:
                return found.to(self.device, self.dtype)
        return member.cut.tensor(self.tensor(f"{member.name}.weight", member.shape))

    def _biases(self, members: "Sequence[_Member]") -> torch.Tensor | None:
        """Return the concatenated biases; None if there are none or another rank adds them."""
        biases = [
            member.cut.bias(self.tensor(f"{member.name}.bias", member.shape[:1]))
            for member in members
            if member.has_bias
        ]
        return torch.cat(biases) if biases and biases[0] is not None else None

    def audit(self) -> None:
        """Raise CheckpointError with the names if tensors of the checkpoint were not used."""
        if self.pipeline is None:
            self.source.audit(without=self.elsewhere)
            return
        ours, layer = self._layer_numbers, self.family.layer
        unread = [f"{layer.format(i=i)}." for i in range(self.config.num_layers) if i not in ours]
        if not self.has_ends:
            ends = (*self.family.model_tensors, SCORE, *RANKER_TENSORS)
            unread += [name.removesuffix("weight") for name in ends]
        self.source.audit(tuple(unread), self.elsewhere)

    @property
    def _layer_numbers(self) -> range:
        if self.pipeline is None:
            return range(self.config.num_layers)
        return self.pipeline.layers(self.config.num_layers)

    def shape(self, shape: Shape) -> tuple[int, ...]:
        """Return a shape of the family's row as numbers."""
        return tuple(size(names, self._sizes) for names in shape)

    @staticmethod
    def _without_activation(weight: Weight) -> Weight:
        """Drop the activation scheme, since an embedding's inputs are token ids."""
        return replace(weight, activation=None, input_scale=None)

    def float_linear(
        self,
        weight_NK: torch.Tensor,
        bias_N: torch.Tensor | None = None,
        names: tuple[str, ...] = (),
    ) -> FloatLinear:
        """Create a float linear with the selected kernel."""
        fixed_order = self.kernels.get("float") == FIXED_ORDER
        return FloatLinear(weight_NK, bias_N, names, fixed_order=fixed_order)

    def _quantized(self, weight: Weight, bias: torch.Tensor | None) -> QuantLinear:
        kernel = self.kernels.get(kernel_operation(weight))
        return QuantLinear.for_inference(
            weight.to(self.device), bias, self.dtype, self.device, kernel
        )


def kernel_operation(weight: Weight) -> str:
    """Return the operation name in `--kernel` for a weight."""
    bits = weight.spec.bits
    if weight.activation is not None:
        return "w4a8" if bits == 4 else "w8a8"
    return f"w{kernel_bits(bits)}a16"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """A linear of the checkpoint, and its shard on this rank."""

    name: str
    shape: tuple[int, int]  # of the whole linear
    has_bias: bool
    cut: LinearShard
