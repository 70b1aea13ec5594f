"""LayerWeights: the weights of one layer, in the form that the layer's builder needs.

N: outputs. K: inputs. C: hidden size. E: experts.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from formats.architecture.columns import ATTENTION
from formats.architecture.flags import is_set
from formats.architecture.projection import Projection
from formats.errors import InputError
from formats.in_memory.slices import Rows, take_rows
from formats.numerics.alibi import alibi_slopes
from qkernels import ops
from qkernels.choice import FIXED_ORDER
from qkernels.moe.experts import PreparedExperts
from qserve.model.blocks.block_attention import BlockIndexer
from qserve.model.blocks.gemma.layer_inputs import LayerInput
from qserve.model.blocks.latent.attention import LatentShape
from qserve.model.blocks.latent.indexer import Indexer
from qserve.model.blocks.linear import (
    FloatLinear,
    GatheredInput,
    Linear,
    RowParallel,
)
from qserve.model.blocks.moe import Router, TableRouter
from qserve.model.blocks.norm import Norm
from qserve.model.loading.expert_weights import (
    correction_of,
    expert_weights,
    media_routers,
    routing_of,
    scaled,
    table_router,
)
from qserve.model.loading.latent_weights import absorbed, block_indexer, indexer
from qserve.model.model_config import ModelConfig
from qserve.model.rank_shards import HEAD_SIZES
from qserve.model.state_shard import StateShard
from qserve.model.tp_plan import WHOLE, LinearPart, LinearShard, TpPlan
from qserve.parallel.norm import GroupNormOverRanks, NormOverRanks

AnyLinear = TypeVar("AnyLinear", bound=Linear)


class LayerWeights:
    """Weights of one layer. Names of tensors and linears are relative to the layer."""

    def __init__(self, weights: Any, number: int) -> None:
        """`weights`: loading.weights.Weights of the model."""
        self.number = number
        self.rotary = weights.rotary(weights.config.ropes[number])
        self.kernels = weights.kernels
        self._weights = weights
        self._family = weights.family.of_layer(number, weights.config.values)
        self._prefix = weights.family.layer.format(i=number)

    @property
    def config(self) -> ModelConfig:
        """Config of this layer, with this rank's numbers of heads."""
        return self.tp_plan.of_layer(self._weights.config, self.number)

    def linear(
        self,
        projection: Projection,
        *,
        down: Projection | None = None,
        summed: bool = True,
        orders: Mapping[str, Rows] | None = None,
    ) -> Linear:
        """Return one Linear for a projection, which may be stored as several linears.

        `down`: the projection that reads the outputs of this one. `summed`: False: if the inputs
        are sharded, the caller sums the results over ranks. `orders`: for linears with another
        order of outputs in the checkpoint, the rows of this rank in the needed order.
        """
        tp_plan = self._weights.tp_plan
        cuts = [
            tp_plan.cut(projection, linear, self._prefix, self._order_of, down)
            for linear in projection.linears
        ]
        if orders:
            cuts = [
                replace(cut, rows=orders[linear.name]) if linear.name in orders else cut
                for cut, linear in zip(cuts, projection.linears, strict=True)
            ]
        by_head = projection.inputs in HEAD_SIZES
        widths = tp_plan.head_widths(projection.inputs) if by_head else ()
        has_order = bool(orders)
        return self._made(projection, cuts, widths, has_order=has_order, summed=summed)

    def state_linear(
        self, projection: Projection, *, orders: Mapping[str, Rows] | None = None
    ) -> Linear:
        """Return one Linear for a projection of a mixer with states: this rank's heads or channels.

        `orders`: as in `linear`.
        """
        mixer, tp_plan, shard = self._family.state_mixer, self._weights.tp_plan, self.state_shard
        grouped = mixer.grouped and projection in mixer.readers
        has_order = bool(orders) or grouped
        if tp_plan.is_whole and not has_order:
            cuts = [WHOLE for _ in projection.linears]
        elif projection.split == "outputs":
            cuts = [
                LinearShard(
                    rows=orders[linear.name]
                    if orders and linear.name in orders
                    else shard.rows(linear.outputs, grouped=grouped)
                )
                for linear in projection.linears
            ]
        else:
            (linear,) = projection.linears
            columns, rank = shard.columns, tp_plan.communicator.rank
            if self._order_of(linear.name, self._weights.shape(linear.shape)) is not None:
                columns = tp_plan.sorted_inputs(linear, self._prefix)
            cuts = [LinearShard(columns=columns, has_bias=rank == 0)]
        widths = () if tp_plan.is_whole else shard.widths
        return self._made(projection, cuts, widths, has_order=has_order)

    def partial_linear(self, projection: Projection) -> Linear:
        """Return a replicated Linear whose input is a rank's partial sum."""
        cuts = [WHOLE for _ in projection.linears]
        tp_plan = self._weights.tp_plan
        if not tp_plan.is_whole and tp_plan.communicator.rank:
            cuts = [LinearShard(has_bias=False) for _ in cuts]
        return self._made(projection, cuts, summed=False)

    def _made(
        self,
        projection: Projection,
        cuts: Sequence[LinearShard],
        widths: tuple[int, ...] = (),
        *,
        has_order: bool = False,
        summed: bool = True,
    ) -> Linear:
        """Create one Linear from shards (`cuts`) of a projection's linears.

        `widths`: number of input channels of each rank; a matrix with sorted inputs gathers them.
        `has_order`: True if outputs have another order than in the checkpoint.
        """
        linears, tp_plan = projection.linears, self._weights.tp_plan
        shapes = [self._weights.shape(linear.shape) for linear in linears]
        if has_order or not tp_plan.is_whole:
            for linear, shape, cut in zip(linears, shapes, cuts, strict=True):
                order = None if cut.columns is None else self._order_of(linear.name, shape)
                part = LinearPart.of(cut, order)
                self._weights.parts[f"{self._prefix}.{linear.name}"] = part
        gathered = None
        if not tp_plan.is_whole and projection.split == "inputs" and widths:
            order = self._order_of(linears[0].name, shapes[0])
            if order is not None:
                ours = order[slice(*cuts[0].columns)]
                gathered = GatheredInput(widths=widths, order_K=ours)
        made = self._weights.linear(
            [f"{self._prefix}.{linear.name}" for linear in linears],
            [n for n, _ in shapes],
            shapes[0][1],
            bias=is_set(projection.bias, self._weights.config.values),
            cuts=cuts,
        )
        self._known(projection, made)
        if tp_plan.is_whole or projection.split == "outputs" or not summed:
            return made
        return RowParallel(made, tp_plan.communicator, gathered)

    def _known(self, projection: Projection, made: AnyLinear) -> AnyLinear:
        """Record and return the Linear that runs a projection."""
        for linear in projection.linears:
            self._weights.linears[f"{self._prefix}.{linear.name}"] = made
        return made

    def _order_of(self, name: str, shape: tuple[int, int]) -> torch.Tensor | None:
        """Return the order of a linear's inputs, if the checkpoint sorts them by group, or None."""
        full = f"{self._prefix}.{name}"
        if not self._weights.source.is_quantized(full):
            return None
        return self._weights.source.input_order(full, shape)

    def norm(self, name: str) -> torch.Tensor:
        """Return the weight of a norm that the family's row lists."""
        row = next(norm for norm in self._family.norms if norm.name == name)
        shape = self._weights.shape(((row.size,),))
        factors = self._weights.norm(f"{self._prefix}.{name}.weight", shape, row.offset)
        part = self._weights.tp_plan.head_rows(row.size)
        return factors if part is None else factors[slice(*part)].clone()

    def head_norms(self) -> dict[str, torch.Tensor]:
        """Return norm weights [heads, D] of queries and keys as arguments; {} without them."""
        weights, found = self._weights, {}
        for name, (local, shape) in self._family.head_norms.items():
            stored = weights.tensor(f"{self._prefix}.{local}", weights.shape(shape))
            part = weights.tp_plan.head_rows(shape[0][0])
            found[name] = stored if part is None else stored[slice(*part)].clone()
        return found

    def norm_bias(self, name: str) -> torch.Tensor | None:
        """Return the bias of a norm that the family's row lists; None if norms have no bias."""
        if not self._family.norm_bias:
            return None
        row = next(norm for norm in self._family.norms if norm.name == name)
        shape = self._weights.shape(((row.size,),))
        return self._weights.tensor(f"{self._prefix}.{name}.bias", shape)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of a mixer with states, except projections, by argument name."""
        weights, mixer, found = self._weights, self._family.state_mixer, {}
        for local, each in mixer.present(weights.config.values):
            stored = weights.source.tensor(f"{self._prefix}.{local}", weights.shape(each.shape))
            if not weights.tp_plan.is_whole and each.of_heads:
                rows = self.state_shard.rows(each.shape[each.axis])
                stored = take_rows(stored, rows, each.axis)
            dtype = torch.float32 if each.float32 else weights.dtype
            found[each.key] = stored.to(weights.device, dtype)
        # the checkpoint has one convolution, or several for ranges of channels
        convolutions = [found.pop(key) for key in list(found) if key.startswith("conv_weight")]
        if convolutions:
            found["conv_weight"] = torch.cat(convolutions).squeeze(1)
        return found

    def gate_linear(self, projection: Projection, tensors: dict[str, torch.Tensor]) -> FloatLinear:
        """Return a projection whose weights are state tensors, which are removed from `tensors`."""
        present = dict(self._family.state_mixer.present(self._weights.config.values))
        weights = []
        for linear in projection.linears:
            each = present[f"{linear.name}.weight"]
            weights.append(tensors.pop(each.key))
            if each.of_heads and not self._weights.tp_plan.is_whole:
                rows = self.state_shard.rows(linear.outputs)
                self._weights.parts[f"{self._prefix}.{linear.name}"] = LinearPart(rows=rows)
        return self._known(projection, self._weights.float_linear(torch.cat(weights)))

    @functools.cached_property
    def state_shard(self) -> StateShard:
        """This rank's shard of the layer's mixer with states."""
        return self._weights.tp_plan.state(self.number)

    def group_norm_over_ranks(self) -> GroupNormOverRanks | None:
        """Return the norm for groups that are sharded over ranks; None: ranks have whole groups."""
        tp_plan, split = self._weights.tp_plan, self.state_shard.split_group
        if split is None:
            return None
        group, num_groups = split
        sizes, mixer = self._weights.config.sizes, self._family.state_mixer
        return GroupNormOverRanks(
            communicator=tp_plan.communicator,
            group=group,
            num_groups=num_groups,
            total=sizes[mixer.out.inputs] // num_groups,
            fixed_order=self.kernels.get("states") == FIXED_ORDER,
        )

    def state_norm_over_ranks(self) -> NormOverRanks | None:
        """Return the norm over all heads of a mixer with states; None: this rank has all heads."""
        tp_plan, mixer = self._weights.tp_plan, self._family.state_mixer
        if tp_plan.is_whole:
            return None
        return NormOverRanks(
            communicator=tp_plan.communicator,
            total=self._weights.config.sizes[mixer.out.inputs],
            counts=True,
            fixed_order=self.kernels.get("states") == FIXED_ORDER,
        )

    def constant(self, values: torch.Tensor) -> torch.Tensor:
        """Return constants, such as values of config.json, in the activations' dtype."""
        return values.to(self._weights.device, self._weights.dtype)

    def float32_constant(self, values: torch.Tensor) -> torch.Tensor:
        """Return constants, such as values of config.json, in float32."""
        return values.to(self._weights.device, torch.float32)

    def float_linear(self, weight_NK: torch.Tensor) -> FloatLinear:
        """Create a float linear with the selected kernel."""
        return self._weights.float_linear(weight_NK)

    def absorbed(self, shape: LatentShape) -> tuple[torch.Tensor, torch.Tensor]:
        """Return W_UK and W_UV of latent attention."""
        return absorbed(self._weights, self._prefix, self._family.latent[-1], shape)

    @property
    def selects_keys(self) -> bool:
        """True if the family has an indexer and contexts may exceed the number of selected keys."""
        row, weights = self._family.indexer, self._weights
        return row is not None and weights.max_model_len > weights.config.values[row.count_key]

    def indexer(self) -> Indexer | None:
        """Return the indexer of the layer; None if it has none or contexts are short enough."""
        row = self._family.indexer
        if not (self.selects_keys and row.is_in(self.number, self._weights.config.values)):
            return None
        return indexer(self._weights, self._prefix, row, self.rotary)

    def block_indexer(self) -> BlockIndexer | None:
        """Return the indexer of the layer; None if it has none or contexts are short enough."""
        row, weights = self._family.block_indexer, self._weights
        values = weights.config.values
        if not row.is_in(self.number, values) or weights.max_model_len <= row.most_keys(values):
            return None
        return block_indexer(weights, self._prefix, row, self.linear, self.rotary)

    def has_norm(self, name: str) -> bool:
        """Return True if the model has this norm of the family's row."""
        config = self._weights.config.values
        return any(n.name == name and is_set(n.present, config) for n in self._family.norms)

    def router(self) -> Router | TableRouter:
        """Return the router of the layer's experts."""
        experts, config = self._family.experts, self._weights.config.values
        rule = experts.routing
        routing = scaled(self._weights, self._prefix, routing_of(experts, config))
        E = routing.num_experts
        name = f"{self._prefix}.{experts.router}"
        shape = (E, self._weights.config.hidden_size)
        if experts.has_table(self.number, config):
            table = f"{self._prefix}.{experts.module}.{rule.table}"
            return table_router(self._weights, f"{name}.weight", shape, table, routing)
        weight = self._weights.tensor(f"{name}.weight", shape)
        return Router(
            routing,
            weight.float() if rule.float32 else weight,
            self._weights.tensor(f"{name}.bias", (E,)) if rule.bias else None,
            correction_of(self._weights, self._prefix, E),
            self._router_norm(rule.input_scale) if rule.input_scale else None,
            self._float32(rule.expert_scale, (E,)) if rule.expert_scale else None,
            fixed_order=self.kernels.get("experts") == FIXED_ORDER,
        )

    def media_routers(self) -> tuple[Router, Router]:
        """Return the routers of experts for text and of those for tokens of media."""
        is_fixed = self.kernels.get("experts") == FIXED_ORDER
        experts = self._family.experts
        return media_routers(self._weights, self._prefix, experts, fixed_order=is_fixed)

    def _router_norm(self, scale: str) -> Norm:
        """Return the norm of a router's input; its weight is made from the tensor `scale`."""
        width = self._weights.config.hidden_size
        scale_C = self._float32(scale, (width,)) * width**-0.5
        return Norm(scale_C, self._weights.config.norm_eps)

    def _float32(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._dequantized(name, shape).to(self._weights.device, torch.float32)

    def shared_gate(self) -> FloatLinear | None:
        """Return the gate of the layer's shared expert, or None."""
        projection, weights = self._family.experts.shared.gate_projection, self._weights
        if projection is None:
            return None
        name = f"{self._prefix}.{projection.name}.weight"
        made = weights.float_linear(weights.tensor(name, (1, weights.config.hidden_size)))
        return self._known(projection, made)

    def experts(self, *, of_media: bool = False) -> PreparedExperts:
        """Return the layer's experts, prepared for their kernel.

        `of_media`: those for tokens of media.
        """
        weights = self._weights
        found = expert_weights(weights, self._prefix, self.number, of_media=of_media)
        kernel = self.kernels.get("experts")
        prepared = ops.prepare_experts(found, weights.dtype, weights.device, kernel)
        if prepared.problem.kernel == "reference" and weights.device.type == "cuda" and not kernel:
            raise InputError(
                f"{self._prefix} experts",
                "no kernel supports them, and plain torch would synchronize with the GPU after "
                "each routing decision",
                "use --kernel experts=reference and --enforce-eager to run them slowly",
            )
        return prepared

    def expert_numbers(self) -> torch.Tensor | None:
        """Return int32 [E]: model expert number -> local number on this rank.

        Experts of other ranks map to the count of local experts. None: this rank has a shard of
        each expert.
        """
        weights = self._weights
        here = weights.tp_plan.experts(self.number)
        if here is None:
            return None
        E = routing_of(self._family.experts, weights.config.values).num_experts
        numbers_E = torch.full((E,), len(here), dtype=torch.int32)
        numbers_E[list(here)] = torch.arange(len(here), dtype=torch.int32)
        return numbers_E.to(weights.device)

    def scalar(self) -> torch.Tensor:
        """Return the factor of the layer's output."""
        return self._weights.tensor(f"{self._prefix}.{self._family.layer_scalar}", (1,))

    def layer_input(self) -> LayerInput | None:
        """Return the block that adds the per-layer input; None if the model has no such inputs."""
        row = self._family.layer_inputs
        if row is None:
            return None
        norm = Norm(self.norm(row.norm), self._weights.config.norm_eps, self._family.norm_kind)
        gate, projection = self.linear(row.gate), self.linear(row.projection)
        return LayerInput(gate=gate, projection=projection, norm=norm)

    def activation_tensors(self) -> dict[str, torch.Tensor]:
        """Return learned parameters of the activation in float32, by argument name."""
        weights = self._weights
        return {
            key: self._float32(name, weights.shape(shape))
            for key, (name, shape) in self._family.activation_tensors.items()
        }

    def kind_tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a float tensor that layers of this layer's type have.

        Without `dtype`, it has the dtype of the model.
        """
        weights = self._weights
        shapes = self._family.tensors_of_kind(weights.config.values, self.number)
        stored = self._dequantized(name, weights.shape(shapes[name]))
        return stored.to(weights.device, dtype or weights.dtype)

    def dense_tensor(self, name: str) -> torch.Tensor:
        """Return a float tensor that layers with a dense feed-forward have, in float32."""
        return self._float32(name, self._weights.shape(self._family.dense_tensors[name]))

    def _dequantized(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor as floats, also if the file has it quantized."""
        source, full = self._weights.source, f"{self._prefix}.{name}"
        module = full.removesuffix(".weight")
        if module != full and source.is_quantized(module):
            return source.weight(module, shape).dequantize()
        return source.tensor(full, shape)

    def sinks(self) -> dict[str, torch.Tensor]:
        """Return attention sinks (an extra score per head) as an argument; {} without sinks."""
        if not self._family.sinks:
            return {}
        size = "num_attention_heads"
        name, shape = f"{self._prefix}.{self._family.sinks}", self._weights.shape(((size,),))
        found = self._weights.source.tensor(name, shape)
        part = self._weights.tp_plan.head_rows(size)
        found = found if part is None else found[slice(*part)].clone()
        return {"sinks": found.to(self._weights.device, torch.float32)}

    def alibi_slopes(self) -> dict[str, torch.Tensor]:
        """Return ALiBi slopes of this rank's heads as an argument; {} without ALiBi."""
        if not self._family.alibi:
            return {}
        num_heads = self._weights.config.values["num_attention_heads"]
        slopes = torch.tensor(alibi_slopes(num_heads), dtype=torch.float32)
        if self._family.scaled_alibi:
            slopes *= self._weights.config.head_dim**-0.5
        part = self.tp_plan.head_rows("num_attention_heads")
        slopes = slopes if part is None else slopes[slice(*part)].clone()
        return {"slopes": slopes.to(self._weights.device)}

    @property
    def tp_plan(self) -> TpPlan:
        """Tensor-parallel shard of these weights."""
        return self._weights.tp_plan

    def norms_over_ranks(self) -> tuple[NormOverRanks, NormOverRanks] | None:
        """Return norms of queries and keys for norms over all heads, if heads are sharded.

        Returns None if this rank can compute the norms alone.
        """
        tp_plan, sizes = self._weights.tp_plan, {norm.size for norm in self._family.norms}
        if tp_plan.is_whole or not sizes & {"q", "kv"}:
            return None
        q, k = (
            NormOverRanks(
                communicator=tp_plan.communicator,
                total=self._weights.shape(((size,),))[0],
                counts=size == "q" or tp_plan.heads.is_first,
                fixed_order=self.kernels.get("float") == FIXED_ORDER,
            )
            for size in ("q", "kv")
        )
        return q, k

    def kv_scales(self) -> dict[str, torch.Tensor]:
        """Return k_scale and v_scale as arguments, if the checkpoint has them for a KV cache."""
        scales = self._weights.source.kv_scales(f"{self._prefix}.{ATTENTION}")
        part = self._weights.tp_plan.kv_head_rows(self.number)
        if part is not None:  # if scales are per KV head, take this rank's
            scales = {n: s[slice(*part)].clone() if s.ndim else s for n, s in scales.items()}
        return {name: scale.to(self._weights.device) for name, scale in scales.items()}
