"""How a size is shared out over several GPUs: where each one's part begins and ends. No tensors.

A part is made of whole units: the groups of the linear that is split by its inputs, so that no two
GPUs need one scale. Parts need not be equal. Where there are fewer groups than GPUs, or a head ends
inside of a group, groups are cut into smaller ones of the same scale, which is exact.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from formats.bits import code_multiple
from formats.errors import InputError
from formats.scheme import CHANNEL, Scheme

FLAG = "--tensor-parallel-size"
# Sizes that kernels like, the best first.
WIDTHS = (128, 64, 32, 16, 8, 4, 2, 1)
LEAST_EVEN = 16  # narrower units are not worth equal shares
MIN_GROUP = 8  # inputs

Share = tuple[int, int]  # from, to before
Units = tuple[tuple[int, ...], ...]  # sizes of a unit, in tiers: all of one before the next


def input_units(scheme: Scheme | None) -> Units:
    """What inputs of a linear may be cut at the multiples of. None: of a float one."""
    if scheme is None:
        return (WIDTHS,)
    spec = scheme.weight
    word = code_multiple(spec.bits) if spec.type == "int" else 1
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


def share_out(extent: int, size: int, units: Units) -> tuple[Share, ...] | None:
    """`size` shares of an extent, none empty; None: its units are too few."""
    for tier in units:
        even = next((u for u in tier if u >= LEAST_EVEN and extent % (u * size) == 0), None)
        unit = even or next((unit for unit in tier if -(-extent // unit) >= size), None)
        if unit is not None:
            count = -(-extent // unit)
            ends = [count * rank // size for rank in range(size + 1)]
            # the larger ones first: rank 0 has the most room where ranks are unequal in memory
            sizes = sorted((b - a for a, b in zip(ends, ends[1:], strict=False)), reverse=True)
            stops = [min(extent, sum(sizes[: rank + 1]) * unit) for rank in range(size)]
            return tuple(zip([0, *stops[:-1]], stops, strict=True))
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShare:
    """The heads of one GPU. Where there are fewer KV heads than GPUs, some hold the same one."""

    heads: Share
    kv_heads: Share
    is_first: bool = True  # of those that hold these KV heads

    @property
    def num_heads(self) -> int:
        return self.heads[1] - self.heads[0]

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads[1] - self.kv_heads[0]


def share_heads(
    num_heads: int, num_kv_heads: int, head_dim: int, size: int, schemes: Sequence[Scheme | None]
) -> tuple[HeadShare, ...]:
    """Of each GPU. `schemes`: of the output projections, whose inputs follow the heads.

    Raises InputError where the heads cannot be shared out.
    """
    per_kv_head = num_heads // num_kv_heads
    if size <= num_kv_heads:
        found = _share_units(num_kv_heads, per_kv_head * head_dim, size, schemes)
        if found is not None:
            return tuple(
                HeadShare(heads=(a * per_kv_head, b * per_kv_head), kv_heads=(a, b))
                for a, b in found
            )
    elif size % num_kv_heads == 0:
        copies = size // num_kv_heads
        found = _share_units(per_kv_head, head_dim, copies, schemes)
        if found is not None:
            return tuple(
                HeadShare(
                    heads=(kv_head * per_kv_head + a, kv_head * per_kv_head + b),
                    kv_heads=(kv_head, kv_head + 1),
                    is_first=number == 0,
                )
                for kv_head in range(num_kv_heads)
                for number, (a, b) in enumerate(found)
            )
    raise InputError(
        f"{FLAG} {size}",
        f"{num_heads} attention heads of {num_kv_heads} KV heads cannot be shared out over"
        f" {size} GPUs",
        "use fewer",
    )


def _share_units(
    count: int, width: int, size: int, schemes: Sequence[Scheme | None]
) -> tuple[Share, ...] | None:
    """Share out `count` things of so many inputs each: whole groups if that leaves none empty."""
    tiers = max(len(input_units(scheme)) for scheme in schemes)
    for tier in range(tiers):
        step = 1
        for scheme in schemes:
            units = [unit for row in input_units(scheme)[: tier + 1] for unit in row]
            steps = [math.lcm(width, unit) // width for unit in units]
            step = math.lcm(step, min(steps))
        found = share_out(count, size, ((step,),))
        if found is not None and all(a < b for a, b in found):
            return found
    return None


def share_features(name: str, extent: int, size: int, scheme: Scheme | None) -> tuple[Share, ...]:
    """Of the inputs of a linear that is split by them. Raises InputError, with `name`."""
    found = share_out(extent, size, input_units(scheme))
    if found is None:
        raise InputError(
            f"{FLAG} {size}",
            f"{name}: its {extent} inputs cannot be shared out in groups of {scheme}",
            "use fewer GPUs",
        )
    return found
