"""W4A8 with int8 inputs for up to 16 rows on sm_90, in Gluon: products of the integer tensor core.

Like wna16/sm90_gemv_imma.py, but a row of x is one column of operand B, where a 16-bit row takes
four limbs. Each warp streams its own K steps of codes from memory into registers, and adds up its
own sums; warps share nothing before the final reduction.

The stored codes are those of sm90.py. Their order is the order of the inputs, so operand B is x as
it is in memory: lane 4 g + t reads inputs 16 i + 4 t .. + 3 of row g, for i = 0..7.

Sums: with scales of groups, each group's exact sum is added to a float32 total; with multiples, to
an integer total; with one scale per output, the tensor core adds up all K steps itself.

Legend: M rows of x, K inputs, N outputs, G groups; W warps of a block, each with its own K steps of
128 inputs; BN outputs of a block; T tiles of 8 rows of x.
"""

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from qkernels.gpu.launch import launch
from qkernels.gpu.pdl_gluon import griddepcontrol_wait, launch_dependents
from qkernels.linear.prepared import PreparedWeight
from qkernels.operands.imma_gemv import (
    MAGIC,
    MAGIC_FLOAT,
    int8_values,
    load_codes,
    operand_a,
    operand_b,
    packed_pointers,
    store_sums,
    streamed_layout,
    sums_layout,
)
from qkernels.w4a8 import layout
from qkernels.w4a8.gemv_config import TILE_ROWS, W4A8GemvConfig
from qkernels.w4a8.sm90_structs import Numerics

STORED_ROWS = gl.constexpr(layout.TILE_N)  # outputs per stored tile
ROW_BYTES = gl.constexpr(layout.K_STEP // 2)  # codes of an output in a K step
COLUMNS = gl.constexpr(TILE_ROWS)
K_STEP = gl.constexpr(layout.K_STEP)
FACTOR_BITS = gl.constexpr(int(layout.INT_FACTOR).bit_length() - 1)


@functools.cache
def layouts(W: int, BN: int, F: int) -> dict[str, object]:
    """Return the register layouts; lane = 4 g + t.

    PACKED: bytes of codes [W, BN 64]. X: codes of x [W, F steps, 8 rows, 128], four bytes of a lane
    together. SUMS: the mma accumulator.
    """
    steps = [[0, 1 << i, 0, 0] for i in range(F.bit_length() - 1)]
    x = gl.DistributedLinearLayout(
        # the first loads of all steps come first, so that all cache lines are requested early
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2], *steps, *([0, 0, 0, 1 << i] for i in (4, 5, 6))],
        lane_bases=[[0, 0, 0, 4], [0, 0, 0, 8], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]],
        warp_bases=[[1 << i, 0, 0, 0] for i in range(W.bit_length() - 1)],
        block_bases=[],
        shape=[W, F, TILE_ROWS, layout.K_STEP],
    )
    return {"PACKED": streamed_layout(W, 64 * BN), "X": x, "SUMS": sums_layout(W)}


def run(
    codes_MK: torch.Tensor,
    scales_M1: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None,
    y_MN: torch.Tensor,
    config: W4A8GemvConfig,
    numerics: Numerics,
) -> torch.Tensor:
    """Multiply int8 codes of 1 to 16 rows and write the result to contiguous `y_MN`."""
    M, K = codes_MK.shape
    packed, scales = weight.tensors["packed"], weight.tensors["scales"]
    launch(
        _w4a8_gemv,
        (packed.shape[0] * (layout.TILE_N // config.block_n),),
        codes_MK,
        scales_M1,
        packed.view(torch.int8),
        weight.tensors["multiples"] if numerics.in_multiples else scales,
        scales,
        bias,
        y_MN,
        M,
        weight.out_features,
        K // layout.K_STEP,
        CONFIG=config,
        NUMERICS=numerics,
        WHOLE=config.fills(K // layout.K_STEP),
        **layouts(config.warps, config.block_n, config.steps_in_flight),
        num_warps=config.warps,
        launch_pdl=True,
    )
    return y_MN


@gluon.jit
def _halves(parts):
    """Split parts [A, B, C, P] into halves of the last dimension."""
    A: gl.constexpr = parts.shape[0]
    B: gl.constexpr = parts.shape[1]
    C: gl.constexpr = parts.shape[2]
    P: gl.constexpr = parts.shape[3] // 2
    return gl.split(parts.reshape([A, B, C, 2, P]).permute([0, 1, 2, 4, 3]))


@gluon.jit
def _split_last(x, PARTS: gl.constexpr):
    """Split x [A, B, C, PARTS] into PARTS tensors [A, B, C], within each thread."""
    parts = (x,)
    for _ in gl.static_range(PARTS.bit_length() - 1):
        halved = ()
        for j in gl.static_range(len(parts)):
            halved += _halves(parts[j])
        parts = halved
    found = ()
    for j in gl.static_range(PARTS):
        found += (parts[j].reshape([x.shape[0], x.shape[1], x.shape[2]]),)
    return found


@gluon.jit
def _offset(
    first,
    warp,
    i: gl.constexpr,
    k_steps,
    SIZE: gl.constexpr,
    CONFIG: gl.constexpr,
    WHOLE: gl.constexpr,
):
    """Return the offset of K step `i` of those that a warp has in flight; a step has SIZE elements.

    After the last K step, that of the last one.
    """
    W: gl.constexpr = CONFIG.warps
    if WHOLE:
        # 64 bits, so that all steps in flight share an address register
        return (first + warp).to(gl.int64) * SIZE + i * W * SIZE
    else:
        return gl.minimum(first + i * W + warp, k_steps - 1) * SIZE


@gluon.jit
def _load_x(
    ptrs,
    first,
    k_steps,
    GROUPS: gl.constexpr,
    CONFIG: gl.constexpr,
    WHOLE: gl.constexpr,
    ZERO_AFTER: gl.constexpr,
):
    """Load x of all steps in flight: a tuple of [W, 128 / GROUPS, 8], one for each step and group.

    ptrs: pointers [1, 1, 8, 128] to the first K step. After the last K step, x is that of the last
    one, or ZERO_AFTER.
    """
    X: gl.constexpr = ptrs.type.layout
    W: gl.constexpr = CONFIG.warps
    STEPS: gl.constexpr = CONFIG.steps_in_flight
    BK: gl.constexpr = K_STEP // GROUPS
    OF_WARPS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, X)))
    OF_STEPS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, X)))
    warp = gl.arange(0, W, layout=OF_WARPS)[:, None, None, None]
    step = gl.arange(0, STEPS, layout=OF_STEPS)[None, :, None, None] * W
    if WHOLE:
        x = gl.load(ptrs + _offset(first, warp, 0, k_steps, K_STEP, CONFIG, WHOLE) + step * K_STEP)
    else:
        ptrs = ptrs + _offset(first, warp + step, 0, k_steps, K_STEP, CONFIG, WHOLE)
        if ZERO_AFTER:
            x = gl.load(ptrs, mask=first + warp + step < k_steps, other=0)
        else:
            x = gl.load(ptrs)
    x = x.reshape([W, STEPS, COLUMNS, GROUPS, BK]).permute([0, 4, 2, 1, 3])
    return _split_last(x.reshape([W, BK, COLUMNS, STEPS * GROUPS]), STEPS * GROUPS)


@gluon.jit
def _load_boxes(
    ptrs, first, warp, i: gl.constexpr, k_steps, NUMERICS, CONFIG: gl.constexpr, WHOLE: gl.constexpr
):
    """Load the scales or multiples of a K step in flight: a tuple of [W, BN], one for each group.

    After the last K step they are 0.
    """
    GROUPS: gl.constexpr = NUMERICS.groups
    BOXES: gl.constexpr = GROUPS * STORED_ROWS  # of a K step
    boxes = ()
    if NUMERICS.steps_per_group == 1:
        ptrs = ptrs + _offset(first, warp, i, k_steps, BOXES, CONFIG, WHOLE)[:, None]
    else:
        group = (first + i * CONFIG.warps + warp) // NUMERICS.steps_per_group
        ptrs = ptrs + (group * STORED_ROWS)[:, None]
    for g in gl.static_range(GROUPS):
        if WHOLE:
            boxes += (gl.load(ptrs + g * STORED_ROWS),)
        else:
            inside = first + i * CONFIG.warps + warp < k_steps
            boxes += (gl.load(ptrs + g * STORED_ROWS, mask=inside[:, None], other=0),)
    return boxes


@gluon.jit
def _add(total, product, factor, NUMERICS: gl.constexpr):
    """Return the total [W, BN, 8] plus a group's product times its scale or multiple [W, BN]."""
    if NUMERICS.in_groups:
        exact = product.to(gl.float32, bitcast=True) - MAGIC_FLOAT
        scale = factor.to(gl.float32)[:, :, None].broadcast_to(exact.shape)
        return gl.fma(exact, scale, total)
    else:
        return total + product * factor.to(gl.int32)[:, :, None]


@gluon.jit(do_not_specialize=["M"])
def _w4a8_gemv(
    codes_ptr,  # [M, K] int8
    input_scales_ptr,  # [M]
    packed_ptr,  # [N/64, K/128, 64, 64] bytes
    boxes_ptr,  # [N/64, G, 64] scales or multiples; in_boxes
    scales_ptr,  # [N], already divided by the factor of codes; without in_groups
    bias_ptr,  # [N] or None
    y_ptr,  # [M, N]
    M,
    N,
    k_steps,
    CONFIG: gl.constexpr,  # W4A8GemvConfig
    NUMERICS: gl.constexpr,  # Numerics
    WHOLE: gl.constexpr,  # CONFIG.fills(k_steps)
    PACKED: gl.constexpr,  # layouts()
    X: gl.constexpr,
    SUMS: gl.constexpr,
):
    W: gl.constexpr = CONFIG.warps
    BN: gl.constexpr = CONFIG.block_n
    TILES: gl.constexpr = CONFIG.block_m // COLUMNS
    IN_FLIGHT: gl.constexpr = CONFIG.steps_in_flight
    GROUPS: gl.constexpr = NUMERICS.groups
    IN_BOXES: gl.constexpr = NUMERICS.in_boxes
    TOTAL: gl.constexpr = gl.float32 if NUMERICS.in_groups else gl.int32
    ROWS: gl.constexpr = gl.SliceLayout(2, SUMS)
    X_ROWS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, X)))
    X_INPUTS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, X)))
    RESULT: gl.constexpr = gl.SliceLayout(0, SUMS)  # [BN, 8]
    block = gl.program_id(0)
    packed_ptrs = packed_pointers(packed_ptr, block, k_steps, BN, STORED_ROWS, ROW_BYTES, PACKED)
    warp = gl.arange(0, W, layout=gl.SliceLayout(1, PACKED))
    row_warp = gl.arange(0, W, layout=gl.SliceLayout(1, ROWS))
    row = gl.arange(0, BN, layout=gl.SliceLayout(0, ROWS))
    groups = k_steps * GROUPS // NUMERICS.steps_per_group
    box_ptrs = boxes_ptr + block // (STORED_ROWS // BN) * groups * STORED_ROWS
    box_ptrs = box_ptrs + (block % (STORED_ROWS // BN) * BN + row[None, :])
    x_inputs = gl.arange(0, K_STEP, layout=X_INPUTS)[None, None, None, :]
    # columns beyond M repeat the last row; their sums are not stored
    x_ptrs = ()
    columns = ()
    for j in gl.static_range(TILES):
        m = gl.minimum(j * COLUMNS + gl.arange(0, COLUMNS, layout=X_ROWS), M - 1)
        x_ptrs += (codes_ptr + (m * (k_steps * K_STEP))[None, None, :, None] + x_inputs,)
        m = j * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, RESULT))
        columns += (gl.minimum(m, M - 1),)
    if not NUMERICS.in_groups:
        n = block * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, RESULT))
        scales = gl.load(scales_ptr + gl.minimum(n, N - 1))
    initial = gl.full([W, BN, COLUMNS], MAGIC if NUMERICS.in_groups else 0, gl.int32, SUMS)
    totals = ()
    input_scales = ()
    for _ in gl.static_range(TILES):
        totals += (gl.full([W, BN, COLUMNS], 0, TOTAL, SUMS),)
        input_scales += (gl.zeros([COLUMNS], gl.float32, gl.SliceLayout(0, RESULT)),)
    for first in range(0, k_steps, IN_FLIGHT * W):
        # after the last K step, repeat it with scales of 0, or with an x of 0
        codes = ()
        boxes = ()
        for i in gl.static_range(IN_FLIGHT):
            offset = _offset(first, warp, i, k_steps, ROW_BYTES * STORED_ROWS, CONFIG, WHOLE)
            codes += (load_codes(packed_ptrs + offset[:, None]),)
            if IN_BOXES:
                boxes += _load_boxes(box_ptrs, first, row_warp, i, k_steps, NUMERICS, CONFIG, WHOLE)
        if first == 0:
            # weights never change; the previous kernel may still write x
            griddepcontrol_wait()
            loaded = ()
            for j in gl.static_range(TILES):
                loaded += (gl.load(input_scales_ptr + columns[j]),)
            input_scales = loaded
        xs = ()
        for j in gl.static_range(TILES):
            xs += (_load_x(x_ptrs[j], first, k_steps, GROUPS, CONFIG, WHOLE, not IN_BOXES),)
        for i in gl.static_range(IN_FLIGHT):
            values = int8_values(codes[i], 4).reshape([W, BN, GROUPS, K_STEP // GROUPS])
            values = _split_last(values.permute([0, 1, 3, 2]), GROUPS)
            new = ()
            for j in gl.static_range(TILES):
                total = totals[j]
                for g in gl.static_range(GROUPS):
                    a = operand_a(values[g], SUMS)
                    b = operand_b(xs[j][i * GROUPS + g], SUMS)
                    if IN_BOXES:
                        product = mma_v2(a, b, initial)
                        total = _add(total, product, boxes[i * GROUPS + g], NUMERICS)
                    else:
                        total = mma_v2(a, b, total)
                new += (total,)
            totals = new
    launch_dependents()
    for j in gl.static_range(TILES):
        total = totals[j]
        if NUMERICS.in_multiples:
            total = total >> FACTOR_BITS  # exact; the sum of all warps may need these bits
        sums = gl.sum(total, 0).to(gl.float32)
        if NUMERICS.in_groups:
            sums = sums / NUMERICS.factor
        sums = sums * input_scales[j][None, :]  # x's scale first, as in sm90.py
        if not NUMERICS.in_groups:
            sums = sums * scales[:, None]
        store_sums(sums, y_ptr, bias_ptr, block * BN, j * COLUMNS, M, N)
