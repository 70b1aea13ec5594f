"""Tensor-parallel shards of a dimension: where each GPU's shard begins and ends.

A shard consists of whole units: groups of the linear that is split by its inputs, so that no two
GPUs need the same scale. Shards need not be equal. If there are fewer groups than GPUs, or a head
ends inside a group, groups are cut into smaller ones with the same scale, which is exact.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from formats.architecture.sizes import check_heads
from formats.errors import InputError
from formats.in_memory.k_weight import MIN_INPUTS, is_in_blocks
from formats.numerics.bits import code_multiple
from formats.scheme import CHANNEL, FP4_TYPES, Scheme

FLAG = "--tensor-parallel-size"
# Unit sizes that are fast in kernels, best first.
WIDTHS = (128, 64, 32, 16, 8, 4, 2, 1)
EXPERT = ".experts."  # part of the names of experts' linears
WHOLE_EXPERTS = ", or divide whole experts by --enable-expert-parallel"
MIN_EVEN = 16  # smallest unit that is used to make shards equal
MIN_GROUP = 8  # smallest group, in inputs

Shard = tuple[int, int]  # (start, stop)
Units = tuple[tuple[int, ...], ...]  # unit sizes in tiers, each tried completely


def input_units(scheme: Scheme | None) -> Units:
    """Return unit sizes at whose multiples a linear's inputs may be split. None: a float linear."""
    if scheme is None:
        return (WIDTHS,)
    spec = scheme.weight
    word = code_multiple(spec.bits) if spec.type == "int" else 1
    word = MIN_INPUTS if is_in_blocks(spec) or spec.type in FP4_TYPES else word
    group = spec.group_size
    if group == CHANNEL:
        return (tuple(width for width in WIDTHS if width % word == 0) or (word,),)
    whole = math.lcm(group, word)
    wide = tuple(width for width in WIDTHS if width > whole and width % whole == 0)
    parts = tuple(
        group // 2**power
        for power in range(1, group.bit_length())
        if group % 2**power == 0
        and group // 2**power >= MIN_GROUP
        and group // 2**power % word == 0
    )
    return ((*wide, whole), parts)


def shard_extent(extent: int, size: int, units: Units) -> tuple[Shard, ...] | None:
    """Divide an extent into `size` non-empty shards; None: there are too few units."""
    for tier in units:
        even = next((u for u in tier if u >= MIN_EVEN and extent % (u * size) == 0), None)
        unit = even or next((unit for unit in tier if -(-extent // unit) >= size), None)
        if unit is not None:
            count = -(-extent // unit)
            ends = [count * rank // size for rank in range(size + 1)]
            # larger shards first: rank 0 has the most free memory if ranks differ
            sizes = sorted((b - a for a, b in zip(ends, ends[1:], strict=False)), reverse=True)
            stops = [min(extent, sum(sizes[: rank + 1]) * unit) for rank in range(size)]
            return tuple(zip([0, *stops[:-1]], stops, strict=True))
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShard:
    """Heads on one GPU. With fewer KV heads than GPUs, several GPUs hold the same KV head."""

    heads: Shard
    kv_heads: Shard
    is_first: bool = True  # the first of the GPUs that hold these KV heads

    @property
    def num_heads(self) -> int:
        return self.heads[1] - self.heads[0]

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads[1] - self.kv_heads[0]


def shard_heads(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    size: int,
    schemes: Sequence[Scheme | None],
    words: tuple[str, str] = ("attention heads", "KV heads"),
) -> tuple[HeadShard, ...]:
    """Return each GPU's heads. `schemes` are the schemes of the output projections.

    `words` are the names of heads and KV heads in errors. Raises InputError if the heads cannot be
    divided.
    """
    check_heads(num_heads, num_kv_heads)
    if head_dim < 1:
        raise InputError(
            f"config.json: {num_heads} {words[0]}",
            "are more than their output projection has inputs",
            "copy config.json from the float model",
        )
    per_kv_head = num_heads // num_kv_heads
    if size <= num_kv_heads:
        found = _shard_units(num_kv_heads, per_kv_head * head_dim, size, schemes)
        if found is not None:
            return tuple(
                HeadShard(heads=(a * per_kv_head, b * per_kv_head), kv_heads=(a, b))
                for a, b in found
            )
    elif size % num_kv_heads == 0:
        copies = size // num_kv_heads
        found = _shard_units(per_kv_head, head_dim, copies, schemes)
        if found is not None:
            return tuple(
                HeadShard(
                    heads=(kv_head * per_kv_head + a, kv_head * per_kv_head + b),
                    kv_heads=(kv_head, kv_head + 1),
                    is_first=number == 0,
                )
                for kv_head in range(num_kv_heads)
                for number, (a, b) in enumerate(found)
            )
    raise InputError(
        f"{FLAG} {size}",
        f"{num_heads} {words[0]} of {num_kv_heads} {words[1]} cannot be divided over {size} GPUs",
        "use fewer",
    )


def _shard_units(
    count: int, width: int, size: int, schemes: Sequence[Scheme | None]
) -> tuple[Shard, ...] | None:
    """Divide `count` heads, in whole groups if no shard becomes empty."""
    tiers = max(len(input_units(scheme)) for scheme in schemes)
    for tier in range(tiers):
        step = 1
        for scheme in schemes:
            units = [unit for row in input_units(scheme)[: tier + 1] for unit in row]
            steps = [math.lcm(width, unit) // width for unit in units]
            step = math.lcm(step, min(steps))
        found = shard_extent(count, size, ((step,),))
        if found is not None and all(a < b for a, b in found):
            return found
    return None


def shard_features(name: str, extent: int, size: int, scheme: Scheme | None) -> tuple[Shard, ...]:
    """Divide the inputs of a row-parallel linear. Raises InputError, with `name`."""
    found = shard_extent(extent, size, input_units(scheme))
    if found is None:
        raise InputError(
            f"{FLAG} {size}",
            f"{name}: its {extent} inputs cannot be divided over the GPUs in groups of {scheme}",
            f"use fewer GPUs{WHOLE_EXPERTS if EXPERT in name else ''}",
        )
    return found
