"""Weights of a model as its builder requests them: on the device, merged and ready to run.

Every name and shape comes from the family's row. Legend: N outputs, K inputs, C hidden size, V
vocabulary.
"""

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from tqdm import tqdm

from formats.architecture.bare_model import SCORE
from formats.architecture.columns import ATTENTION
from formats.architecture.flags import is_set
from formats.architecture.projection import Projection, Shape
from formats.architecture.sizes import size
from formats.errors import CheckpointError, InputError
from formats.in_memory.k_weight import KWeight
from formats.in_memory.slices import Rows, take_outputs
from formats.in_memory.weights import Weight, merge
from formats.numerics.alibi import alibi_slopes
from qkernels import QuantLinear, ops
from qkernels.choice import FIXED_ORDER
from qkernels.moe.experts import PreparedExperts
from qserve.model.blocks.embedding import Embedding, PackedTable, VocabularyPart
from qserve.model.blocks.latent_attention import LatentShape
from qserve.model.blocks.layer_inputs import LayerInput, LayerInputs
from qserve.model.blocks.linear import (
    FloatLinear,
    GatheredInput,
    GatheredLinear,
    Linear,
    RowParallel,
    SplitLinear,
)
from qserve.model.blocks.moe import Router
from qserve.model.blocks.norm import Norm
from qserve.model.blocks.rotary import Rotary
from qserve.model.dummy_source import DummySource
from qserve.model.expert_weights import expert_weights, routing_of
from qserve.model.latent_weights import absorbed
from qserve.model.model_config import ModelConfig
from qserve.model.rope import RopeConfig, cos_sin_table
from qserve.model.sharing import WHOLE, Cut, LinearPart, Sharing
from qserve.model.weight_source import WeightSource
from qserve.parallel.norm import NormOverRanks
from qserve.parallel.pipeline import Pipeline

logger = logging.getLogger(__name__)

Source = WeightSource | DummySource
AnyLayer = TypeVar("AnyLayer", bound=torch.nn.Module)


class Weights:
    """Tensors and linears by name, from a checkpoint or random. Call `audit` last."""

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
        sharing: Sharing | None = None,
        pipeline: Pipeline | None = None,
        on_layer: Callable[[torch.nn.Module], None] | None = None,
    ) -> None:
        """`kernels`: kernels selected or excluded, by operation (EngineConfig).

        `sharing`: this rank's shard of each layer; None: all. `pipeline`: this rank's stage.
        `on_layer`: called with each finished layer.
        """
        self._on_layer = on_layer
        self.kernels, self.pipeline = kernels or {}, pipeline
        # Linear name -> its shard, filled as linears are created, if the model is divided.
        self.parts: dict[str, LinearPart] = {}
        self.sharing = sharing or Sharing(config)
        self.config, self.family, self.source = config, config.family, source
        self._sizes = config.sizes
        self.device, self.dtype, self.max_model_len = device, dtype, max_model_len
        self._progress = progress
        self._rotaries: list[tuple[RopeConfig | None, Rotary]] = []

    @property
    def has_ends(self) -> bool:
        """True if this stage needs embedding, last norm and head."""
        return self.pipeline is None or self.pipeline.is_first

    def embedding(
        self, name: str | None = None, shape: tuple[int, ...] | None = None
    ) -> torch.Tensor | PackedTable:
        """Token embedding [V, C]; in a divided model, this rank's rows.

        `name`: another table than the model's. `shape`: of that table, if it is another one.
        """
        name = name or self.family.embedding
        shape = shape or self.shape(self.family.model_tensors[self.family.embedding])
        module, part = name.removesuffix(".weight"), self.vocabulary
        if self.source.is_quantized(module):
            weight = self._without_activation(self.source.weight(module, shape))
            if part is not None:
                weight = take_outputs(weight, ((part.start, part.stop),))
            return PackedTable(weight.to(self.device), self.dtype)
        table_VC = self.tensor(name, shape)
        return table_VC if part is None else table_VC[part.start : part.stop].clone()

    @property
    def vocabulary(self) -> VocabularyPart | None:
        """Tokens of this rank; None: all."""
        if self.sharing.is_whole:
            return None
        return VocabularyPart(
            communicator=self.sharing.communicator, shares=self.sharing.vocabulary()
        )

    def last_norm(self) -> Norm:
        """The norm before the head."""
        family, shape = self.family, (self.config.hidden_size,)
        bias = self.tensor(family.last_norm_bias, shape) if family.norm_bias else None
        weight = self.norm(family.last_norm, shape)
        return Norm(weight, self.config.norm_eps, family.norm_kind, bias)

    def embedding_norm(self) -> Norm | None:
        """The norm of embeddings, in models that have one."""
        family, shape = self.family, (self.config.hidden_size,)
        if not family.embedding_norm:
            return None
        bias = self.tensor(family.embedding_norm_bias, shape) if family.norm_bias else None
        weight = self.norm(family.embedding_norm, shape)
        return Norm(weight, self.config.norm_eps, family.norm_kind, bias)

    def positions(self) -> torch.Tensor | None:
        """Embeddings of positions [positions, C], in models that learn them."""
        learned = self.family.positions
        if learned is None:
            return None
        shape = self.shape(self.family.model_tensors[learned.name])
        return self.tensor(learned.name, shape)[learned.offset :]

    def layer_inputs(self) -> LayerInputs | None:
        """Inputs of all layers, in models that have them."""
        row, config = self.family.layer_inputs, self.config
        if row is None:
            return None
        width, shapes = config.values[row.width_key], row.tensors
        table = self.embedding(row.table, self.shape(shapes[row.table]))
        projection = f"{row.model_projection}.weight"
        weight = self.tensor(projection, self.shape(shapes[projection]))
        norm = Norm(self.norm(row.model_norm, (width,)), config.norm_eps, self.family.norm_kind)
        return LayerInputs(
            table=Embedding(table, width**0.5), projection=self.float_linear(weight), norm=norm
        )

    def head(self, embedding: torch.Tensor | PackedTable) -> Linear:
        """Output head: a separate matrix, or the embedding."""
        name = self.family.head.removesuffix(".weight")
        if not self.config.tied_head or self.source.is_quantized(name):
            return self.output_matrix(name)
        if isinstance(embedding, PackedTable):
            return self._gathered(self._quantized(embedding.packed, None))
        return self._gathered(self.float_linear(embedding))

    def output_matrix(self, name: str) -> Linear:
        """Matrix from states to logits of the whole vocabulary."""
        part = self.vocabulary
        cut = WHOLE if part is None else Cut(rows=((part.start, part.stop),))
        sizes = [self.config.vocab_size], self.config.hidden_size
        return self._gathered(self.linear([name], *sizes, bias=self.family.head_bias, cuts=[cut]))

    def _gathered(self, head: Linear) -> Linear:
        part = self.vocabulary
        return head if part is None else GatheredLinear(head, part.communicator, part.widths)

    def classifier(self) -> torch.Tensor | None:
        """Matrix of a classifier [labels, C], if the checkpoint has one."""
        if self.config.instead_of_head != SCORE or not self.has_ends:
            return None
        return self.tensor(SCORE, (len(self.config.labels), self.config.hidden_size))

    def layers(self) -> Generator["LayerWeights", None, None]:
        """Weights of each layer in turn."""
        numbers = self._layer_numbers
        hidden = None if self._progress else True  # None: shown on terminals alone
        with tqdm(numbers, desc="Loading layers", disable=hidden) as bar:
            for number in bar:
                for next_number in (number, number + 1):
                    if next_number in numbers:
                        self.source.expect(self.family.layer.format(i=next_number))
                yield self.layer(number)

    def finished(self, layer: AnyLayer) -> AnyLayer:
        """Report a layer that its builder has finished, and return it."""
        if self._on_layer is not None:
            self._on_layer(layer)
        return layer

    def layer(self, number: int) -> "LayerWeights":
        """Weights of one layer."""
        return LayerWeights(self, number)

    def rotary(self, rope: RopeConfig | None) -> Rotary:
        """Rotations of all positions, one table for equal layers; None: rotates no channel."""
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

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A float tensor. Raises CheckpointError if it is missing or has another shape."""
        return self.source.tensor(name, shape).to(self.device, self.dtype)

    def norm(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Factors of a norm: the tensor, plus 1 in families that store it without.

        In float32 where the family rounds after the product alone (ops.NormSpec).
        """
        stored = self.source.tensor(name, shape).to(self.device, torch.float32)
        dtype = torch.float32 if self.family.float32_norms else self.dtype
        return (stored + self.family.norm_offset).to(dtype)

    def linear(
        self,
        names: Sequence[str],
        outs: Sequence[int],
        ins: int,
        *,
        bias: bool = False,
        cuts: Sequence[Cut] | None = None,
    ) -> Linear:
        """One layer with `ins` inputs from linears with the given outputs, concatenated.

        `cuts`: the shard of each linear. Members with different quantization stay separate. Raises
        CheckpointError if only some are quantized and the configuration does not say so.
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
                ", ".join(names), f"only {', '.join(sorted(quantized))} of this group is quantized"
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
        """One weight of all members; where they differ, neighbours in equal blocks share one."""
        parts = [self._coded(member) for member in members]
        if len(parts) == 1:
            return [(parts[0], list(members))]
        try:
            return [(merge(parts, members[0].name), list(members))]
        except CheckpointError as error:
            names = ", ".join(member.name for member in members)
            logger.info("%s stay apart: %s", names, error.problem)
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
        weight = self.source.weight(member.name, member.shape)
        return member.cut.weight(weight, member.name)

    def _float(self, member: "_Member") -> torch.Tensor:
        return member.cut.tensor(self.tensor(f"{member.name}.weight", member.shape))

    def _biases(self, members: "Sequence[_Member]") -> torch.Tensor | None:
        """Concatenated biases; None: there are none, or another rank adds them."""
        biases = [
            member.cut.bias(self.tensor(f"{member.name}.bias", member.shape[:1]))
            for member in members
            if member.has_bias
        ]
        return torch.cat(biases) if biases and biases[0] is not None else None

    def audit(self) -> None:
        """Raise CheckpointError, with the names, if tensors were left over."""
        if self.pipeline is None:
            self.source.audit()
            return
        ours, layer = self._layer_numbers, self.family.layer
        unread = [f"{layer.format(i=i)}." for i in range(self.config.num_layers) if i not in ours]
        if not self.has_ends:
            ends = (*self.family.model_tensors, SCORE)
            unread += [name.removesuffix("weight") for name in ends]
        self.source.audit(tuple(unread))

    @property
    def _layer_numbers(self) -> range:
        if self.pipeline is None:
            return range(self.config.num_layers)
        return self.pipeline.layers(self.config.num_layers)

    def shape(self, shape: Shape) -> tuple[int, ...]:
        """Shape of a row in numbers."""
        return tuple(size(names, self._sizes) for names in shape)

    @staticmethod
    def _without_activation(weight: Weight) -> Weight:
        """Drop the activation scheme: an embedding's input is a token id, and cannot be rounded."""
        return replace(weight, activation=None, input_scale=None)

    def float_linear(
        self,
        weight_NK: torch.Tensor,
        bias_N: torch.Tensor | None = None,
        names: tuple[str, ...] = (),
    ) -> FloatLinear:
        """Linear that is not quantized, with the selected kernel."""
        fixed_order = self.kernels.get("float") == FIXED_ORDER
        return FloatLinear(weight_NK, bias_N, names, fixed_order=fixed_order)

    def _quantized(self, weight: Weight, bias: torch.Tensor | None) -> QuantLinear:
        kernel = self.kernels.get(kernel_operation(weight))
        return QuantLinear.for_inference(
            weight.to(self.device), bias, self.dtype, self.device, kernel
        )


def kernel_operation(weight: Weight) -> str:
    """Return the operation by which `--kernel` names a weight's kernels."""
    if weight.activation is not None:
        return "w8a8"
    bits = weight.spec.bits
    if isinstance(weight, KWeight):  # kernels hold 5- and 6-bit codes in 8 bits
        bits = 4 if bits == 4 else 8
    return f"w{bits}a16"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """A linear of a checkpoint, and the shard of it that is used."""

    name: str
    shape: tuple[int, int]  # of the whole linear
    has_bias: bool
    cut: Cut


class LayerWeights:
    """Weights of one layer; names are relative to the layer."""

    def __init__(self, weights: Weights, number: int) -> None:
        self.number = number
        self.rotary = weights.rotary(weights.config.ropes[number])
        self.kernels = weights.kernels
        self._weights = weights
        self._family = weights.family.of_layer(number, weights.config.values)
        self._prefix = weights.family.layer.format(i=number)

    def linear(
        self,
        projection: Projection,
        *,
        down: Projection | None = None,
        summed: bool = True,
        orders: Mapping[str, Rows] | None = None,
    ) -> Linear:
        """Single matrix of a projection, however it is stored.

        `down`: the projection that reads the features of this one. `summed` False: if ranks hold
        parts of the inputs, the caller sums over them. `orders`: other output orders of linears,
        for models that are not divided.
        """
        linears, sharing = projection.linears, self._weights.sharing
        shapes = [self._weights.shape(linear.shape) for linear in linears]
        cuts = [
            sharing.cut(projection, linear, self._prefix, self._order_of, down)
            for linear in linears
        ]
        if orders:
            cuts = [
                replace(cut, rows=orders[linear.name]) if linear.name in orders else cut
                for cut, linear in zip(cuts, linears, strict=True)
            ]
        if orders or not sharing.is_whole:
            for linear, shape, cut in zip(linears, shapes, cuts, strict=True):
                order = None if cut.columns is None else self._order_of(linear.name, shape)
                part = LinearPart.of(cut, order)
                self._weights.parts[f"{self._prefix}.{linear.name}"] = part
        gathered = None
        if not sharing.is_whole and projection.inputs == "q":
            order = self._order_of(linears[0].name, shapes[0])
            if order is not None:
                ours = order[slice(*cuts[0].columns)]
                gathered = GatheredInput(widths=sharing.head_widths, order_K=ours)
        made = self._weights.linear(
            [f"{self._prefix}.{linear.name}" for linear in linears],
            [n for n, _ in shapes],
            shapes[0][1],
            bias=is_set(projection.bias, self._weights.config.values),
            cuts=cuts,
        )
        if sharing.is_whole or projection.split == "outputs" or not summed:
            return made
        return RowParallel(made, sharing.communicator, gathered)

    def _order_of(self, name: str, shape: tuple[int, int]) -> torch.Tensor | None:
        """Order in which a linear takes its inputs, if the checkpoint sorts them by group."""
        full = f"{self._prefix}.{name}"
        if not self._weights.source.is_quantized(full):
            return None
        return self._weights.source.input_order(full, shape)

    def norm(self, name: str) -> torch.Tensor:
        """Factors of a norm of the family's row."""
        row = next(norm for norm in self._family.norms if norm.name == name)
        shape = self._weights.shape(((row.size,),))
        factors = self._weights.norm(f"{self._prefix}.{name}.weight", shape)
        part = self._weights.sharing.head_rows(row.size)
        return factors if part is None else factors[slice(*part)].clone()

    def norm_bias(self, name: str) -> torch.Tensor | None:
        """The bias of a norm of the family's row; None: its norms have none."""
        if not self._family.norm_bias:
            return None
        row = next(norm for norm in self._family.norms if norm.name == name)
        shape = self._weights.shape(((row.size,),))
        return self._weights.tensor(f"{self._prefix}.{name}.bias", shape)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Tensors of a mixer with a state besides its projections, by the names of its block."""
        weights, mixer, found = self._weights, self._family.state_mixer, {}
        for local, each in mixer.present(weights.config.values):
            stored = weights.source.tensor(f"{self._prefix}.{local}", weights.shape(each.shape))
            dtype = torch.float32 if each.float32 else weights.dtype
            found[each.key] = stored.to(weights.device, dtype)
        return {**found, "conv_weight": found["conv_weight"].squeeze(1)}

    def constant(self, values: torch.Tensor) -> torch.Tensor:
        """Numbers of config.json as a tensor of the activations' dtype."""
        return values.to(self._weights.device, self._weights.dtype)

    def absorbed(self, shape: LatentShape) -> tuple[torch.Tensor, torch.Tensor]:
        """W_UK and W_UV of latent attention."""
        return absorbed(self._weights, self._prefix, shape)

    def has_norm(self, name: str) -> bool:
        """True if the model has a norm of the family's row."""
        config = self._weights.config.values
        return any(n.name == name and is_set(n.present, config) for n in self._family.norms)

    def router(self) -> Router:
        """Router of the layer's experts."""
        experts, config = self._family.experts, self._weights.config.values
        rule, routing = experts.routing, routing_of(experts, config)
        E = routing.num_experts
        name = f"{self._prefix}.{experts.router}"
        shape = (E, self._weights.config.hidden_size)
        correction = None
        if rule.correction:
            stored = f"{self._prefix}.{experts.module}.{rule.correction}"
            row = (1, E) if rule.correction_is_row else (E,)
            found = self._weights.source.tensor(stored, row).flatten()
            correction = found.to(self._weights.device, torch.float32)
        weight = self._weights.tensor(f"{name}.weight", shape)
        return Router(
            routing,
            weight.float() if rule.float32 else weight,
            self._weights.tensor(f"{name}.bias", (E,)) if rule.bias else None,
            correction,
            self._router_norm(rule.input_scale) if rule.input_scale else None,
            self._float32(rule.expert_scale, (E,)) if rule.expert_scale else None,
            fixed_order=self.kernels.get("experts") == FIXED_ORDER,
        )

    def _router_norm(self, scale: str) -> Norm:
        """Norm of what a router reads, without weights, and the scale of that name."""
        width = self._weights.config.hidden_size
        scale_C = self._float32(scale, (width,)) * width**-0.5
        return Norm(scale_C, self._weights.config.norm_eps)

    def _float32(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        stored = self._weights.source.tensor(f"{self._prefix}.{name}", shape)
        return stored.to(self._weights.device, torch.float32)

    def shared_gate(self) -> FloatLinear | None:
        """Gate of the layer's shared expert, if it has one."""
        shared = self._family.experts.shared
        if not shared.gate:
            return None
        name = f"{self._prefix}.{shared.gate}.weight"
        weights = self._weights
        return weights.float_linear(weights.tensor(name, (1, weights.config.hidden_size)))

    def experts(self) -> PreparedExperts:
        """The layer's experts, prepared for their kernel."""
        weights = self._weights
        found = expert_weights(weights, self._prefix)
        kernel = self.kernels.get("experts")
        prepared = ops.prepare_experts(found, weights.dtype, weights.device, kernel)
        if prepared.problem.kernel == "reference" and weights.device.type == "cuda" and not kernel:
            raise InputError(
                f"{self._prefix} experts",
                "no kernel supports them, and plain torch would synchronize with the GPU "
                "after each choice",
                "use --kernel experts=reference and --enforce-eager to run them slowly",
            )
        return prepared

    def scalar(self) -> torch.Tensor:
        """Factor of what the layer returns."""
        return self._weights.tensor(f"{self._prefix}.{self._family.layer_scalar}", (1,))

    def layer_input(self) -> LayerInput | None:
        """Block that adds the layer's own input, in models with such inputs."""
        row = self._family.layer_inputs
        if row is None:
            return None
        norm = Norm(self.norm(row.norm), self._weights.config.norm_eps, self._family.norm_kind)
        gate, projection = self.linear(row.gate), self.linear(row.projection)
        return LayerInput(gate=gate, projection=projection, norm=norm)

    def activation_tensors(self) -> dict[str, torch.Tensor]:
        """Learned numbers of the activation, float32, by their names in its block."""
        weights = self._weights
        return {
            key: self._float32(name, weights.shape(shape))
            for key, (name, shape) in self._family.activation_tensors.items()
        }

    def sinks(self) -> dict[str, torch.Tensor]:
        """Attention sinks: a score per head besides the keys', if the family has them."""
        if not self._family.sinks:
            return {}
        size = "num_attention_heads"
        name, shape = f"{self._prefix}.{self._family.sinks}", self._weights.shape(((size,),))
        found = self._weights.source.tensor(name, shape)
        part = self._weights.sharing.head_rows(size)
        found = found if part is None else found[slice(*part)].clone()
        return {"sinks": found.to(self._weights.device, torch.float32)}

    def alibi_slopes(self) -> dict[str, torch.Tensor]:
        """ALiBi slopes of this rank's heads, if the family has them."""
        if not self._family.alibi:
            return {}
        num_heads = self._weights.config.values["num_attention_heads"]
        slopes = torch.tensor(alibi_slopes(num_heads), dtype=torch.float32)
        if self._family.scaled_alibi:
            slopes *= self._weights.config.head_dim**-0.5
        part = self.sharing.head_rows("num_attention_heads")
        slopes = slopes if part is None else slopes[slice(*part)].clone()
        return {"slopes": slopes.to(self._weights.device)}

    @property
    def sharing(self) -> Sharing:
        """Tensor-parallel shard of these weights."""
        return self._weights.sharing

    def norms_over_ranks(self) -> tuple[NormOverRanks, NormOverRanks] | None:
        """Norms of queries and keys over ranks, if the family norms all heads together; None: this
        rank alone suffices.
        """
        sharing, sizes = self._weights.sharing, {norm.size for norm in self._family.norms}
        if sharing.is_whole or not sizes & {"q", "kv"}:
            return None
        q, k = (
            NormOverRanks(
                communicator=sharing.communicator,
                total=self._weights.shape(((size,),))[0],
                counts=size == "q" or sharing.heads.is_first,
            )
            for size in ("q", "kv")
        )
        return q, k

    def kv_scales(self) -> dict[str, torch.Tensor]:
        """k_scale and v_scale of a checkpoint calibrated for an 8-bit KV cache, if any."""
        scales = self._weights.source.kv_scales(f"{self._prefix}.{ATTENTION}")
        part = self._weights.sharing.head_rows("num_key_value_heads")
        if part is not None:  # this rank's scales, if each KV head has its own
            scales = {n: s[slice(*part)].clone() if s.ndim else s for n, s in scales.items()}
        return {name: scale.to(self._weights.device) for name, scale in scales.items()}
