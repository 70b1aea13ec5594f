"""TpPlan: how a model is divided over tensor-parallel ranks, and one rank's shard of it.

N: outputs. K: inputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from formats.architecture.columns import HeadsKind
from formats.architecture.projection import Linear, Projection
from formats.architecture.sizes import num_experts
from formats.errors import InputError
from formats.in_memory.shards import (
    WIDTHS,
    HeadShard,
    Shard,
    shard_extent,
    shard_features,
)
from formats.in_memory.slices import Rows, take_inputs, take_outputs, take_rows
from formats.in_memory.weights import Weight
from formats.scheme import Scheme
from qserve.model.model_config import ModelConfig
from qserve.model.rank_shards import HEAD_SIZES, LOCAL, feature_shards, head_shards
from qserve.model.state_shard import StateShard
from qserve.parallel.communicator import Communicator
from qserve.parallel.expert_exchange import ExpertExchange
from qserve.parallel.expert_placement import ExpertPlacement
from qserve.parallel.settings import ParallelSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShard:
    """Shard of one linear, in terms of the stored weight."""

    rows: Rows | None = None  # outputs; None: all
    columns: Shard | None = None  # inputs; None: all
    has_bias: bool = True  # False: another rank adds the bias to the sum over ranks

    @property
    def ranges(self) -> tuple[tuple[int, int], ...] | None:
        """Ranges of outputs, if the shard has all inputs and its outputs are given as ranges."""
        if self.columns is not None or self.rows is None or isinstance(self.rows, torch.Tensor):
            return None
        return tuple((int(start), int(stop)) for start, stop in self.rows)

    def weight(self, weight: Weight, name: str) -> Weight:
        if self.columns is not None:
            return take_inputs(weight, *self.columns, name)
        return weight if self.rows is None else take_outputs(weight, self.rows)

    def tensor(self, weight_NK: torch.Tensor) -> torch.Tensor:
        if self.columns is not None:
            return take_rows(weight_NK, (self.columns,), 1)
        return weight_NK if self.rows is None else take_rows(weight_NK, self.rows)

    def bias(self, bias_N: torch.Tensor) -> torch.Tensor | None:
        if not self.has_bias:
            return None
        return bias_N if self.rows is None else take_rows(bias_N, self.rows)


WHOLE = LinearShard()


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearPart:
    """Outputs and inputs of a linear that a rank has, in the order in which it has them.

    None: all.
    """

    rows: Rows | None = None
    inputs: Rows | None = None

    @classmethod
    def of(cls, cut: LinearShard, order_K: torch.Tensor | None) -> "LinearPart":
        """Create the part of a shard.

        `order_K`: order of the linear's inputs, if they are sorted; `cut.columns` is then a range
        of this order.
        """
        if cut.columns is None:
            return cls(rows=cut.rows)
        if order_K is None:
            return cls(inputs=(cut.columns,))
        return cls(inputs=order_K[slice(*cut.columns)].clone())


class TpPlan:
    """Shards a model over the ranks of a communicator, and describes this rank's shard.

    Without a communicator the shard is the whole model.
    """

    def __init__(
        self,
        config: ModelConfig,
        communicator: Communicator | None = None,
        placement: ExpertPlacement | None = None,
        exchange: ExpertExchange | None = None,
    ) -> None:
        """Raises InputError if the heads cannot be divided among the ranks.

        `placement`: which rank has which whole experts; None: each rank has a slice of every
        expert. `exchange`: engines that have the other experts; everything else is then whole.
        """
        self.communicator, self._placement = communicator, placement
        self.exchange = exchange
        self._config, self._sizes = config, config.sizes
        self._heads: dict[HeadsKind, tuple[HeadShard, ...]] = {}
        if communicator is not None:
            self._heads = head_shards(config, communicator.size)

    @property
    def is_whole(self) -> bool:
        return self.communicator is None

    @property
    def heads(self) -> HeadShard:
        """This rank's heads, for families whose layers all have the same numbers of heads."""
        return self._heads[LOCAL][self.communicator.rank]

    @property
    def has_whole_experts(self) -> bool:
        """True if ranks have whole experts instead of slices of all experts."""
        return (not self.is_whole or self.exchange is not None) and self._placement is not None

    def experts(self, layer: int) -> tuple[int, ...] | None:
        """Return the whole experts of a layer on this rank; None: a slice of every expert."""
        if not self.has_whole_experts:
            return None
        rank = (self.exchange or self.communicator).rank
        return self._placement.of_layer(layer)[rank]

    def rows_by_head(self) -> Rows:
        """Return this rank's rows of a merged matrix that is grouped by KV head.

        For each KV head the matrix has its queries, its key and its value. The result lists all
        queries, then all keys, then all values.
        """
        config, width = self._config, self._config.head_dim
        queries = config.num_heads // config.num_kv_heads  # of one KV head
        heads, kv_heads = (0, config.num_heads), (0, config.num_kv_heads)
        if not self.is_whole:
            heads, kv_heads = self.heads.heads, self.heads.kv_heads
        firsts = [h // queries * (queries + 2) + h % queries for h in range(*heads)]
        for number in (queries, queries + 1):
            firsts += [head * (queries + 2) + number for head in range(*kv_heads)]
        return [(first * width, (first + 1) * width) for first in firsts]

    def rows_in_blocks(self) -> Rows:
        """Return this rank's rows of a merged matrix that consists of blocks of heads.

        Each block has the queries, the values and the keys of its heads. The result lists all
        queries, then all keys, then all values.
        """
        config, width = self._config, self._config.head_dim
        heads = config.num_heads // config.family.qkv.blocks  # of one block
        firsts = [
            (head // heads * 3 + part) * heads + head % heads
            for part in (0, 2, 1)
            for head in range(*self.own_heads)
        ]
        return [(first * width, (first + 1) * width) for first in firsts]

    @property
    def own_heads(self) -> Shard:
        """This rank's range of attention heads."""
        return (0, self._config.num_heads) if self.is_whole else self.heads.heads

    def head_widths(self, size: str) -> tuple[int, ...]:
        """Return the number of channels of each rank, for a size name in HEAD_SIZES."""
        if self.is_whole:
            return ()
        kind, of_kv = HEAD_SIZES[size]
        width, shards = self._head_width(size), self._heads[kind]
        return tuple(width * (s.num_kv_heads if of_kv else s.num_heads) for s in shards)

    def state(self, layer: int) -> StateShard:
        """Return this rank's shard of a layer's mixer with states."""
        if self.is_whole:
            return StateShard.make(self._config, layer)
        return StateShard.make(self._config, layer, self.communicator.size, self.communicator.rank)

    def local(self, config: ModelConfig) -> ModelConfig:
        """Return the config with this rank's numbers of heads."""
        return config if LOCAL not in self._heads else self._with_heads(config, LOCAL)

    def of_layer(self, config: ModelConfig, layer: int) -> ModelConfig:
        """Return the config of one layer, with this rank's numbers of heads."""
        own = config.of_layer(layer)
        if not self._heads:
            return own
        return self._with_heads(own, config.family.heads_kind(layer, config.values))

    def _with_heads(self, config: ModelConfig, kind: HeadsKind) -> ModelConfig:
        heads = self._heads[kind][self.communicator.rank]
        return replace(config, num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads)

    def vocabulary(self, num_tokens: int) -> tuple[Shard, ...]:
        """Return each rank's range of rows of a table with `num_tokens` rows."""
        found = shard_extent(num_tokens, self.communicator.size, (WIDTHS,))
        assert found is not None, "the vocabulary has fewer tokens than there are ranks"
        return found

    def head_rows(self, size: str) -> Shard | None:
        """Return this rank's rows of a tensor whose rows are a size in HEAD_SIZES; None: all."""
        if self.is_whole or size not in HEAD_SIZES:
            return None
        kind, of_kv = HEAD_SIZES[size]
        shard, width = self._heads[kind][self.communicator.rank], self._head_width(size)
        first, last = shard.kv_heads if of_kv else shard.heads
        return first * width, last * width

    def kv_head_rows(self, layer: int) -> Shard | None:
        """Return this rank's KV heads of a layer; None: all."""
        kind = self._config.family.heads_kind(layer, self._config.values)
        return self.head_rows(f"num_{kind}_key_value_heads")

    def _head_width(self, size: str) -> int:
        """Return the number of entries per head of a size in HEAD_SIZES."""
        if size.startswith("num_"):
            return 1
        kind, of_kv = HEAD_SIZES[size]
        shards = self._heads[kind]
        count = shards[-1].kv_heads[1] if of_kv else shards[-1].heads[1]
        return self._sizes[size] // count

    def cut(
        self,
        projection: Projection,
        linear: Linear,
        prefix: str,
        order_of: Callable[[str, tuple[int, int]], torch.Tensor | None],
        down: Projection | None = None,
    ) -> LinearShard:
        """Return this rank's shard of a linear of a layer, except linears of mixers with states.

        `prefix`: name prefix of the layer. `down`: projection that reads the outputs. `order_of`:
        returns the order of a quantized linear's inputs; None: natural order.
        """
        if self.is_whole:
            return WHOLE
        rank = self.communicator.rank
        if projection.split == "inputs":
            by_head = projection.inputs in HEAD_SIZES
            if by_head and order_of(linear.name, self._shape(linear)) is None:
                columns = self.head_rows(projection.inputs)
            else:
                columns = self._features(linear, prefix)[rank]
            return LinearShard(columns=columns, has_bias=rank == 0)
        rows, offset, order = [], 0, None
        if down is not None:
            (down_linear,) = down.linears
            shard = self._features(down_linear, prefix)[rank]
            order = order_of(down_linear.name, self._shape(down_linear))
        for size in linear.outputs:
            found = shard if down is not None else self.head_rows(size)
            start, stop = found or (0, self._sizes[size])
            rows.append((offset + start, offset + stop))
            offset += self._sizes[size]
        if order is None:
            return LinearShard(rows=rows)
        # The rank's range of the sorted inputs of `down` may contain any channels.
        width = self._sizes[linear.outputs[0]]
        ours = order[shard[0] : shard[1]]
        return LinearShard(rows=torch.cat([ours + width * part for part in range(len(rows))]))

    def sorted_inputs(self, linear: Linear, prefix: str) -> Shard:
        """Return this rank's range of the sorted inputs of a linear."""
        return self._features(linear, prefix)[self.communicator.rank]

    def features(self, name: str, size: str, scheme: Scheme | None) -> Shard:
        """Return this rank's range of inputs of a linear whose scheme is not in the config."""
        shards = shard_features(name, self._sizes[size], self.communicator.size, scheme)
        return shards[self.communicator.rank]

    def _features(self, linear: Linear, prefix: str) -> Sequence[Shard]:
        return feature_shards(self._config, self._sizes, linear, prefix, self.communicator.size)

    def _shape(self, linear: Linear) -> tuple[int, int]:
        return sum(self._sizes[size] for size in linear.outputs), self._sizes[linear.inputs]


def place_experts(config: ModelConfig, settings: ParallelSettings) -> ExpertPlacement | None:
    """Place a model's experts on ranks. Returns None if each rank has a slice of every expert.

    Raises InputError if the model has too few experts, or cannot share them.
    """
    if not settings.enable_expert_parallel:
        return None
    size = settings.expert_parallel_size
    experts = num_experts(config.values) if config.family.experts else 0
    if experts < size:
        has = f"has {experts} experts for {size} ranks" if experts else "has no experts"
        raise InputError(
            "--enable-expert-parallel",
            f"the model ({config.family.architecture}) {has}",
            "remove the flag: --tensor-parallel-size alone shards each matrix",
        )
    if config.family.experts.media_inner:
        raise InputError(
            "--enable-expert-parallel",
            f"does not work with {config.family.architecture}, which has other experts for images",
            "remove the flag: --tensor-parallel-size alone shards each matrix",
        )
    row = config.family.experts
    if settings.shares_experts and (row.latent or row.routing.table):
        raise InputError(
            "--enable-expert-parallel",
            f"does not share experts of {config.family.architecture} between engines",
            "use --tensor-parallel-size",
        )
    return ExpertPlacement.make(settings.expert_placement_strategy, experts, size)
