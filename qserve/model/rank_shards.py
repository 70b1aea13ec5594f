"""Shards of a model over tensor-parallel ranks, as its config alone determines them.

TpPlan (tp_plan.py) has one rank's shard of the tensors.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from formats.architecture.columns import HeadsKind
from formats.architecture.family import Family
from formats.architecture.projection import Linear
from formats.errors import InputError
from formats.in_memory.shards import (
    HeadShard,
    Shard,
    input_units,
    shard_extent,
    shard_features,
    shard_heads,
)
from formats.in_memory.slices import Rows
from formats.in_memory.state_shards import check_state_shards
from formats.scheme import Scheme
from qserve.model.fallback.support import BUILDER
from qserve.model.model_config import ModelConfig
from qserve.model.state_shard import StateShard
from qserve.parallel.expert_placement import ExpertPlacement

LOCAL: HeadsKind = "local"
KINDS: tuple[HeadsKind, ...] = get_args(HeadsKind)
# Size name that counts heads or their channels -> (layer type, True for KV heads).
HEAD_SIZES: dict[str, tuple[HeadsKind, bool]] = {
    **dict.fromkeys(("q", "latent_q", "latent_kv", "num_attention_heads"), (LOCAL, False)),
    **dict.fromkeys(("kv", "num_key_value_heads", "block_index_q"), (LOCAL, True)),
    **{
        f"{kind}_{name}": (kind, name in ("kv", "v"))
        for kind in KINDS
        for name in ("q", "kv", "v", "o", "latent_q", "latent_kv")
    },
    **{f"num_{kind}_attention_heads": (kind, False) for kind in KINDS},
    **{f"num_{kind}_key_value_heads": (kind, True) for kind in KINDS},
}


def check_ranks(
    config: ModelConfig, size: int, stages: int, placement: ExpertPlacement | None = None
) -> None:
    """Raise InputError if a model cannot be sharded over the ranks. Reads no weights.

    `size`: number of tensor-parallel ranks. `stages`: number of pipeline stages. `placement`: of
    whole experts on ranks.
    """
    if stages > config.num_layers:
        raise InputError(
            f"--pipeline-parallel-size {stages}",
            f"the model has {config.num_layers} layers, and each stage needs one",
            "use fewer stages",
        )
    family = config.family
    is_one_stage = family.layer_inputs is not None or family.skips
    is_one_stage |= any(
        family.kv_source(layer, config.values) is not None for layer in range(config.num_layers)
    )
    if stages > 1 and is_one_stage:
        raise InputError(
            f"--pipeline-parallel-size {stages}",
            f"does not work with {family.architecture} with per-layer embeddings, shared keys or"
            " skip connections: layers read tensors of other stages",
            "use --tensor-parallel-size",
        )
    for _ in _input_shards(config, size, placement):
        pass  # raises the error


def has_equal_shards(
    config: ModelConfig, size: int, placement: ExpertPlacement | None = None
) -> bool:
    """Return True if the ranks have equally many inputs of each linear, and equally many experts.

    Ranks with other shapes may run other kernels, whose results have other forms. Arguments: see
    `check_ranks`, which must have passed.
    """
    shards = (*_input_shards(config, size, placement), *_sorted_input_shards(config, size))
    return all(len(set(widths)) == 1 for widths in shards)


def _input_shards(
    config: ModelConfig, size: int, placement: ExpertPlacement | None
) -> Iterator[Sequence[int]]:
    """Yield the ranks' numbers of inputs, heads or experts, for all that is sharded by inputs.

    Raises InputError if something cannot be sharded. Yields nothing for a model that transformers
    runs: fallback/division.py checks it, and its linears return tensors.
    """
    if size == 1 or config.family.builder == BUILDER:
        return
    check_state_shards(config.family.state_mixer, size)
    for heads in head_shards(config, size).values():
        yield [each.num_heads for each in heads]
    sizes = config.sizes
    for number in range(config.num_layers):
        if config.state_layers[number]:
            yield StateShard.make(config, number, size).widths
        prefix = config.family.layer.format(i=number)
        experts = config.family.experts
        whole = () if placement is None else experts.down.expert(0).linears
        for linear in _linears_of_features(config.family, number, config.values):
            if linear not in whole:
                yield _widths(feature_shards(config, sizes, linear, prefix, size))
        if placement is not None:
            yield [len(each) for each in placement.of_layer(number)]
        elif experts and experts.fused and experts.is_in(number, config.values):
            name = f"{prefix}.{experts.module}"
            yield _widths(shard_features(name, sizes[experts.down.inputs], size, None))


def _sorted_input_shards(config: ModelConfig, size: int) -> Iterator[Sequence[int]]:
    """Yield the ranks' numbers of inputs of linears that are sharded by heads or states.

    If the file has sorted a linear's inputs (act-order), ranks have ranges of the sorted inputs.
    """
    family = config.family
    if config.quant is None or family.builder == BUILDER:
        return
    mixer = family.state_mixer
    for number in range(config.num_layers):
        row = family.of_layer(number, config.values)
        for projection in row.projections(row.blocks(config.values, number), num_experts=0):
            by_states = mixer is not None and projection in mixer.projections
            if projection.split == "inputs" and (by_states or projection.inputs in HEAD_SIZES):
                (linear,) = projection.linears
                scheme = _scheme(config, f"{family.layer.format(i=number)}.{linear.name}")
                inputs = config.sizes[projection.inputs]
                found = shard_extent(inputs, size, input_units(scheme))
                if found is not None:  # else the file has not sorted them
                    yield _widths(found)


def _widths(shards: Sequence[Shard]) -> list[int]:
    return [stop - start for start, stop in shards]


def _linears_of_features(family: Family, layer: int, values: Mapping[str, Any]) -> Iterator[Linear]:
    """Yield the linears of a layer with sharded inputs, except those sharded by heads or states.

    All experts of a kind are alike, so only the first one's linears are included.
    """
    mixer, row = family.state_mixer, family.of_layer(layer, values)
    num_kinds = 2 if family.experts and family.experts.media_inner else 1
    for projection in row.projections(row.blocks(values, layer), num_experts=num_kinds):
        if mixer is not None and projection in mixer.projections:
            continue
        if projection.split == "inputs" and projection.inputs not in HEAD_SIZES:
            yield from projection.linears


def first_kv_heads(config: ModelConfig, size: int, rank: int) -> tuple[int, ...]:
    """Return, for each layer, a rank's first KV head. `size`: number of tensor-parallel ranks."""
    if size == 1:
        return (0,) * config.num_layers
    shards = head_shards(config, size)
    if not shards:
        return (0,) * config.num_layers
    kinds = (config.family.heads_kind(n, config.values) for n in range(config.num_layers))
    return tuple(shards[kind][rank].kv_heads[0] for kind in kinds)


def state_ranges(
    config: ModelConfig, size: int, rank: int
) -> tuple[dict[str, tuple[int, Rows]], ...]:
    """Return, for each layer, the sharded axis and a rank's ranges of each tensor of a state slot.

    `size`: number of tensor-parallel ranks. A layer without states has {}.
    """
    return tuple(
        StateShard.make(config, number, size, rank).slot_ranges()
        if config.state_layers[number]
        else {}
        for number in range(config.num_layers)
    )


def head_shards(config: ModelConfig, size: int) -> dict[HeadsKind, tuple[HeadShard, ...]]:
    """Return the heads of all ranks, for each layer type; {}: no layer has attention."""
    family, values, sizes = config.family, config.values, config.sizes
    layers: dict[HeadsKind, list[int]] = {}
    for number in range(config.num_layers if config.has_attention else 0):
        layers.setdefault(family.heads_kind(number, values), []).append(number)
    found = {}
    for kind, numbers in layers.items():
        row = family.of_layer(numbers[0], values)
        (o,) = row.o.linears
        names = (f"{family.layer.format(i=number)}.{o.name}" for number in numbers)
        schemes = {_scheme(config, name) for name in names}
        heads, kv_heads = family.heads_of_layer(numbers[0], values)
        width = sizes[o.inputs] // heads
        found[kind] = shard_heads(heads, kv_heads, width, size, sorted(schemes, key=str))
    return found


def feature_shards(
    config: ModelConfig,
    sizes: Mapping[str, int | None],
    linear: Linear,
    prefix: str,
    size: int,
) -> Sequence[Shard]:
    name = f"{prefix}.{linear.name}"
    return shard_features(name, sizes[linear.inputs], size, _scheme(config, name))


def _scheme(config: ModelConfig, module: str) -> Scheme | None:
    return None if config.quant is None else config.quant.scheme_for(module)
