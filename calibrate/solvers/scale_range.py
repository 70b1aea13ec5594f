"""Check that a linear's scales are in the range of float16, the checkpoint's dtype for scales."""

import torch

from formats.in_memory.packed import PackedWeight
from formats.in_memory.weights import Weight
from formats.numerics.affine import MIN_SCALE


def range_notes(weight_NK: torch.Tensor, packed: Weight, name: str) -> list[str]:
    """Return notes for the report about scales that are too small for full accuracy.

    Raises RangeError if float16 cannot represent a scale. Weights other than integer codes, such as
    float8 with its float32 scales, are not checked.
    """
    if not isinstance(packed, PackedWeight):
        return []
    packed.check_range(name)
    sizes_NG = packed.scales_NG.abs()
    total, notes = sizes_NG.numel(), []
    smallest_NG = sizes_NG <= MIN_SCALE
    if smallest_NG.any():
        if packed.input_order is not None:
            weight_NK = weight_NK[:, packed.input_order]
        groups_NGL = weight_NK.unflatten(1, (packed.num_groups, -1))
        reach = float(groups_NGL[smallest_NG].abs().max())
        notes.append(
            f"{int(smallest_NG.sum())} of {total} scales are the smallest that are written: the"
            f" weights there, up to {reach:.2g}, are rounded more coarsely than in"
            f" {packed.spec.bits} bits"
        )
    subnormal = int((sizes_NG < torch.finfo(sizes_NG.dtype).tiny).sum())
    if subnormal:
        notes.append(
            f"{subnormal} of {total} scales are subnormal in {sizes_NG.dtype}: some kernels read"
            " them as 0"
        )
    return notes
