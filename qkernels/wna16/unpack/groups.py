"""Triton device functions that unpack K steps with several groups, each with scale and minimum.

On NVIDIA GPUs USE_PTX enables a piece of inline PTX; apart from a power of two, the weights are the
same without it. Legend: N outputs, K inputs; BN, BK the tile; WORDS of a row and a K step.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from formats.scheme import QuantSpec
from qkernels.wna16.layout import groups_ptx, is_in_groups
from qkernels.wna16.unpack.words import in_order, unpack, unpack_x2


class Grouping(NamedTuple):
    """Groups of a K step, a constexpr of the kernels (layout.GroupedSpec)."""

    group: int  # inputs per group
    groups: int  # groups per K step
    has_minima: bool
    steps_per_block: int  # K steps that share d and dmin; 0: no d and dmin
    has_ptx: bool  # False: a word of codes crosses groups
    ptx: str
    outputs: str  # constraints of the PTX
    factor: float  # factor of scales in the PTX
    addend: float  # factor of minima in the PTX; without minima, of scales
    shrink: float  # factor in the weights that the PTX makes; sums are divided by it


# In the PTX, a bfloat16 code is code 2^-133. The shrink keeps the factor finite for the largest
# scale, 2^23 in Q6_K.
_SHRINK = {torch.float16: 1.0, torch.bfloat16: 2.0**-30}
_FACTOR = {torch.float16: 1.0, torch.bfloat16: 2.0 ** (133 - 30)}


def grouping(spec: QuantSpec, dtype: torch.dtype) -> Grouping | None:
    """Return the groups of a prepacked weight's K steps; None: a K step has one scale."""
    if not is_in_groups(spec):
        return None
    has_ptx = spec.group >= 128 // spec.bits  # the inputs of the four words of a row
    return Grouping(
        group=spec.group,
        groups=spec.groups,
        has_minima=not spec.symmetric,
        steps_per_block=spec.steps_per_block,
        has_ptx=has_ptx,
        ptx=groups_ptx(spec.bits, dtype == torch.float16),
        outputs="=&r," * (16 // spec.bits) + "r,r,r",
        factor=_FACTOR[dtype],
        addend=-_SHRINK[dtype] * (spec.symmetric_zero if spec.symmetric else 1),
        shrink=_SHRINK[dtype] if has_ptx else 1.0,
    )


@triton.jit
def _group_scales(
    scales_ptr,
    blocks_ptr,
    stored_tile,
    stored_row,
    step,
    steps,
    PART: tl.constexpr,
    GROUPING: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Return the scales (PART 0) or minima (PART 1) of a K step's groups in each row, in float32.

    They are exact: a quantized scale has up to 8 bits and d has up to 11.
    """
    PARTS: tl.constexpr = 2 if GROUPING.has_minima else 1
    GROUPS: tl.constexpr = GROUPING.groups
    row = (stored_tile * steps + step) * TILE_N + stored_row
    ptrs = scales_ptr + ((row * PARTS + PART) * GROUPS)[:, None] + tl.arange(0, GROUPS)[None, :]
    values = tl.load(ptrs).to(tl.float32)  # [BN, GROUPS]
    if GROUPING.steps_per_block > 0:
        blocks = steps // GROUPING.steps_per_block
        block = (stored_tile * blocks + step // GROUPING.steps_per_block) * TILE_N + stored_row
        whole = tl.load(blocks_ptr + block * PARTS + PART)
        values *= whole.to(tl.float32)[:, None]
    return values


@triton.jit
def grouped_weights(
    packed,
    scales_ptr,
    blocks_ptr,
    stored_tile,
    stored_row,
    step,
    steps,
    GROUPING: tl.constexpr,
    MAGIC: tl.constexpr,
    OFFSET: tl.constexpr,
    BITS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TILE_N: tl.constexpr,
    DTYPE: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    """Convert packed words [BN, WORDS] of a K step to weights [BN, BK], as KWeight.dequantize.

    A code times its scale has up to 24 bits, so it is exact in float32; the subtraction rounds as
    in gguf-py. With USE_PTX, weights are multiplied by GROUPING.shrink.
    """
    if USE_PTX and GROUPING.has_ptx:
        return _grouped_weights_ptx(
            packed,
            scales_ptr,
            blocks_ptr,
            stored_tile,
            stored_row,
            step,
            steps,
            GROUPING,
            BITS,
            BN,
            BK,
            TILE_N,
            DTYPE,
        )
    values = unpack(packed, MAGIC, BITS, BN, BK, DTYPE, False)
    codes = (values - OFFSET).to(tl.float32).reshape(BN, GROUPING.groups, GROUPING.group)
    scales = _group_scales(
        scales_ptr, blocks_ptr, stored_tile, stored_row, step, steps, 0, GROUPING, TILE_N
    )
    weights = codes * scales[:, :, None]
    if GROUPING.has_minima:
        minima = _group_scales(
            scales_ptr, blocks_ptr, stored_tile, stored_row, step, steps, 1, GROUPING, TILE_N
        )
        weights -= minima[:, :, None]
    return weights.reshape(BN, BK).to(DTYPE)


@triton.jit
def _for_words(values, WORDS: tl.constexpr):
    """Broadcast the groups' values [BN, groups] to the packed words [BN, WORDS] of a K step."""
    BN: tl.constexpr = values.shape[0]
    GROUPS: tl.constexpr = values.shape[1]
    spread = tl.broadcast_to(values[:, None, :, None], (BN, 4, GROUPS, WORDS // 4 // GROUPS))
    return spread.reshape(BN, WORDS)


@triton.jit
def _grouped_weights_ptx(
    packed,
    scales_ptr,
    blocks_ptr,
    stored_tile,
    stored_row,
    step,
    steps,
    GROUPING: tl.constexpr,
    BITS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TILE_N: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Compute grouped_weights with inline PTX, in DTYPE and multiplied by GROUPING.shrink.

    It takes 2.9 instructions per 4-bit weight and 2.5 per 8-bit weight; the compiler needs 6 and 8.
    """
    WORDS: tl.constexpr = BK * BITS // 32
    scales = _group_scales(
        scales_ptr, blocks_ptr, stored_tile, stored_row, step, steps, 0, GROUPING, TILE_N
    )
    minima = scales
    if GROUPING.has_minima:
        minima = _group_scales(
            scales_ptr, blocks_ptr, stored_tile, stored_row, step, steps, 1, GROUPING, TILE_N
        )
    scale = _for_words(scales * GROUPING.factor, WORDS)
    addend = _for_words(minima * GROUPING.addend, WORDS)
    if BITS == 8:
        h0, h1 = tl.inline_asm_elementwise(
            GROUPING.ptx, GROUPING.outputs, [packed, scale, addend], (tl.int32, tl.int32), True, 1
        )
        # [BN, t, BK/16, e, h] -> [BN, BK/16, h, t, e]
        values = tl.join(unpack_x2(h0, DTYPE), unpack_x2(h1, DTYPE))
        values = values.reshape(BN, 4, BK // 16, 2, 2)
        return values.trans(0, 2, 4, 1, 3).reshape(BN, BK)
    else:
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            GROUPING.ptx,
            GROUPING.outputs,
            [packed, scale, addend],
            (tl.int32, tl.int32, tl.int32, tl.int32),
            True,
            1,
        )
        return in_order(p0, p1, p2, p3, BN, BK, DTYPE)


@triton.jit
def prefetch_steps(
    scales_ptr,
    tile,
    first,
    last,
    steps,
    GROUPING: tl.constexpr,
    TILE_N: tl.constexpr,
    BN: tl.constexpr,
):
    """Prefetch scales like prefetch_groups, for K steps with several groups: all 128-byte lines."""
    PARTS: tl.constexpr = 2 if GROUPING.has_minima else 1
    VALUES: tl.constexpr = PARTS * GROUPING.groups * TILE_N  # values per K step
    LINE: tl.constexpr = 1024 // scales_ptr.dtype.element_ty.primitive_bitwidth
    for i in tl.static_range(BN // TILE_N):
        for line in tl.static_range(VALUES // LINE):
            step = tl.minimum(first + tl.arange(0, 128), last - 1)
            ptrs = scales_ptr + ((tile * (BN // TILE_N) + i) * steps + step) * VALUES + line * LINE
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptrs], tl.int32, False, 1
            )
