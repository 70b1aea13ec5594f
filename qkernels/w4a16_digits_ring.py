"""W4A16 of 5 to 16 rows on the integer tensor core of sm_90, in Gluon. Knows no file format.

As w4a16_digits.py, but x's digits are read once for 128 outputs, not for 16. One warp copies
words, digits and scales into a ring in shared memory. Two warpgroups multiply 64 outputs each:
codes from registers, digits from shared memory.

Legend: M rows of x, R rows that digits have place for (8 or 16); K inputs, N outputs, G groups; a
step is 128 inputs, a tile 128 outputs.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from qkernels.digits import Digits
from qkernels.gluon_launch import let_kernel_after_start, wait_for_kernel_before
from qkernels.gluon_meet import add_if_last
from qkernels.gluon_names import descriptor, load_box
from qkernels.gluon_registers import signed_nibbles
from qkernels.gluon_ring import advance
from qkernels.launch import launch, on_device, sm_count, workspace
from qkernels.linear_format import linear_format
from qkernels.prepared import PreparedWeight
from qkernels.tiles import (
    LINEAR_MAX_BLOCK_K,
    LINEAR_RING_BLOCKS_OF_SM,
    LINEAR_TILE_N,
    LinearRingTile,
)

REGISTERS = 80  # of a thread at launch: two blocks fill an SM's
MULTIPLY_REGISTERS = gl.constexpr(96)  # where the warp that copies gives up its own
COPY_REGISTERS = gl.constexpr(40)
PARTS = gl.constexpr(2)  # warpgroups that multiply, 64 outputs of a tile each
WORDS_BOX = [32, 128]  # a stored tile's words, as bytes in rows of 128


def linear(
    digits: Digits,
    weight: PreparedWeight,
    bias: torch.Tensor | None,
    tile: LinearRingTile,
    *,
    offset: int,
) -> torch.Tensor:
    """Digits of M rows, as tile.rows rows, to [M, N]. For groups of 128 n.

    `offset`: what w4a16.py subtracts where symmetric. A row with an inf or NaN comes out as NaN.
    """
    M, K, N = digits.num_rows, digits.in_features, weight.out_features
    y_MN = torch.empty((M, N), dtype=weight.dtype, device=weight.device)
    _, counters = workspace(weight.device)
    scales, offsets = weight.tensors["scales"], weight.tensors.get("offsets")
    units = tile.tiles(N) * tile.split
    with on_device(y_MN):
        launch(
            _w4a16_digits_ring,
            (min(units, LINEAR_RING_BLOCKS_OF_SM * sm_count(weight.device)),),
            descriptor(weight.tensors["words"].view(torch.int8).view(-1, 128), WORDS_BOX),
            descriptor(digits.words.view(torch.int8).view(-1, 128), [4 * tile.rows, 128]),
            descriptor(digits.scales.view(-1), [4 * tile.rows]),
            descriptor(scales.view(-1), [LINEAR_TILE_N]),
            descriptor((scales if offsets is None else offsets).view(-1), [LINEAR_TILE_N]),
            scales if bias is None else bias,
            y_MN,
            digits.free,
            counters,
            M,
            N,
            K // LINEAR_MAX_BLOCK_K,
            tile.tiles(N),
            TILE=tile,
            FORMAT=linear_format(weight, bias, offset),
            num_warps=4,
            maxnreg=REGISTERS,
            launch_pdl=True,
        )
    return y_MN


@gluon.constexpr_function
def _codes_layout():
    """Of a stored tile's bytes [32, 128] in registers: 16 of a row and word t in a thread."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [4, 0]],
        lane_bases=[[0, 16], [0, 32], [0, 64], [1, 0], [2, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=WORDS_BOX,
    )


@gluon.jit
def _left(codes, LEFT: gl.constexpr):
    """Bytes of codes [32, 128] to the left operand [64, 128] of 16 (q - 8). Moves nothing.

    Input 32 j + 16 h + 4 t + b of the operand is half h of byte b of word j of lane t.
    """
    low, high = signed_nibbles(codes)
    # [64, t, j, b, h]
    values = gl.join(low, high).reshape([64, 4, 4, 4, 2]).permute([0, 2, 4, 1, 3])
    return gl.convert_layout(values.reshape([64, 128]), LEFT, assert_trivial=True)


@gluon.jit
def _unit(unit, steps, SPLIT: gl.constexpr):
    """(tile, part of K, first step, end of steps)."""
    part = unit % SPLIT
    return unit // SPLIT, part, part * steps // SPLIT, (part + 1) * steps // SPLIT


@gluon.jit
def _pairs(product):
    """Sums [64, 4 R] of four digits to two [64, R], of the low and the high 16 bits."""
    R: gl.constexpr = product.shape[1] // 4
    # [64, R, d >> 1, d & 1]
    low, high = product.reshape([64, 2, 2, R]).permute([0, 3, 1, 2]).split()
    return (low + (high << 8)).split()


@gluon.jit
def _scaled(product, scales, offsets, fact, FORMAT: gl.constexpr, SUMS: gl.constexpr):
    """Sums of digits [64, 4 R] of a step to its sums [64, R] of weights times inputs."""
    R: gl.constexpr = product.shape[1] // 4
    ROWS: gl.constexpr = gl.SliceLayout(0, SUMS)
    # the operand of a code is 16 (q - 8)
    scale = scales.load(gl.SliceLayout(1, SUMS)).to(gl.float32) / 16
    x_scale = fact.slice(0, R).load(ROWS)
    low, high = _pairs(product)
    low = gl.convert_layout(low, SUMS, assert_trivial=True)
    high = gl.convert_layout(high, SUMS, assert_trivial=True)
    if FORMAT.has_offsets:
        # how far the zero is from the one that the operand has subtracted
        offset = offsets.load(gl.SliceLayout(1, SUMS)).to(gl.float32)
        zero = 16 * (offset - FORMAT.offset).to(gl.int32)[:, None]
        low -= zero * fact.slice(R, R).load(ROWS).to(gl.int32, bitcast=True)[None, :]
        high -= zero * fact.slice(2 * R, R).load(ROWS).to(gl.int32, bitcast=True)[None, :]
    value = high.to(gl.float32) * 65536.0 + low.to(gl.float32)
    return value * (scale[:, None] * x_scale[None, :])


@gluon.jit
def _multiply(
    rings, pointers, sizes, WHICH: gl.constexpr, TILE: gl.constexpr, FORMAT: gl.constexpr
):
    """One warpgroup: its 64 outputs of each tile, and their results."""
    words, digits, facts, scales, offsets, full, empty = rings
    _, _, steps, tiles = sizes
    R: gl.constexpr = TILE.rows
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 4 * R, 32])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 4)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 32])
    stage = gl.program_id(0) * 0  # not a constant, which could not change in a loop
    phase = stage
    for unit in range(gl.program_id(0), tiles * TILE.split, gl.num_programs(0)):
        tile, part, begin, end = _unit(unit, steps, TILE.split)
        sums = gl.zeros([64, R], gl.float32, SUMS)
        for _ in range(begin, end):
            mbarrier.wait(full.index(stage), phase)
            own = stage * PARTS + WHICH
            left = _left(words.index(own).load(_codes_layout()), LEFT)
            right = digits.index(stage).permute([1, 0])
            product = gl.zeros([64, 4 * R], gl.int32, PRODUCT)
            product = warpgroup_mma(left, right, product, use_acc=False, is_async=True)
            product = warpgroup_mma_wait(0, deps=[product])
            fact = facts.index(stage)
            sums += _scaled(product, scales.index(own), offsets.index(own), fact, FORMAT, SUMS)
            mbarrier.arrive(empty.index(stage), count=1)
            stage, phase = advance(stage, phase, TILE.stages)
        _finish(sums, pointers, sizes, tile * PARTS + WHICH, part, TILE, FORMAT)


@gluon.jit
def _finish(sums, pointers, sizes, place, part, TILE: gl.constexpr, FORMAT: gl.constexpr):
    """A warpgroup's sums [64, R] to y. Of parts of K, the last to come adds all in order."""
    bias_ptr, y_ptr, partials_ptr, counters_ptr = pointers
    M, N, _, _ = sizes
    R: gl.constexpr = TILE.rows
    SPLIT: gl.constexpr = TILE.split
    SUMS: gl.constexpr = sums.type.layout
    row = gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    m = gl.arange(0, R, gl.SliceLayout(0, SUMS))
    last = True
    if SPLIT > 1:
        sums, last = add_if_last(sums, place, part, partials_ptr, counters_ptr, SPLIT)
    if last:
        n = place * 64 + row
        if FORMAT.has_bias:
            sums += gl.load(bias_ptr + gl.minimum(n, N - 1)).to(gl.float32)[:, None]
        mask = (n < N)[:, None] & (m < M)[None, :]
        ptrs = y_ptr + m[None, :] * N + n[:, None]
        gl.store(ptrs, sums.to(y_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _copy_weight(
    descs, rings, sizes, tile, step, stage, pred, TILE: gl.constexpr, FORMAT: gl.constexpr
):
    """A step's words and scales into a stage, which is told to expect the digits, too."""
    words_desc, digits_desc, facts_desc, scales_desc, offsets_desc = descs
    words, _, _, scales, offsets, full, _ = rings
    _, N, steps, _ = sizes
    OFFSETS: gl.constexpr = offsets_desc.block_type.nbytes if FORMAT.has_offsets else 0
    OF_PART: gl.constexpr = words_desc.block_type.nbytes + scales_desc.block_type.nbytes + OFFSETS
    OF_X: gl.constexpr = digits_desc.block_type.nbytes + facts_desc.block_type.nbytes
    bar = full.index(stage)
    mbarrier.expect(bar, PARTS * OF_PART + OF_X, pred=pred)
    for i in gl.static_range(PARTS):
        # beyond the last stored tile: the last, whose results go nowhere
        stored = gl.minimum(tile * PARTS + i, (N + 63) // 64 - 1)
        at = stage * PARTS + i
        load_box(words_desc, [(stored * steps + step) * 32, 0], bar, words.index(at), pred=pred)
        group = stored * (steps // FORMAT.steps_of_group) + step // FORMAT.steps_of_group
        load_box(scales_desc, [group * 64], bar, scales.index(at), pred=pred)
        if FORMAT.has_offsets:
            load_box(offsets_desc, [group * 64], bar, offsets.index(at), pred=pred)


@gluon.jit
def _copy(descs, rings, sizes, TILE: gl.constexpr, FORMAT: gl.constexpr):
    """The warp that starts all copies: wait for a stage to be free, fill it, tell `full`."""
    _, digits_desc, facts_desc, _, _ = descs
    _, digits, facts, _, _, full, empty = rings
    _, _, steps, tiles = sizes
    STAGES: gl.constexpr = TILE.stages
    stage = gl.program_id(0) * 0
    phase = stage + 1
    # weights never change: their share of the first stages needs no wait for the kernel before
    tile, _, begin, end = _unit(gl.program_id(0), steps, TILE.split)
    started = gl.minimum(end - begin, STAGES)
    for i in range(started):
        _copy_weight(descs, rings, sizes, tile, begin + i, i, True, TILE, FORMAT)
    wait_for_kernel_before()
    count = stage
    for unit in range(gl.program_id(0), tiles * TILE.split, gl.num_programs(0)):
        tile, _, begin, end = _unit(unit, steps, TILE.split)
        for step in range(begin, end):
            mbarrier.wait(empty.index(stage), phase)
            _copy_weight(descs, rings, sizes, tile, step, stage, count >= started, TILE, FORMAT)
            bar = full.index(stage)
            load_box(digits_desc, [step * (4 * TILE.rows), 0], bar, digits.index(stage))
            load_box(facts_desc, [step * (4 * TILE.rows)], bar, facts.index(stage))
            count += 1
            stage, phase = advance(stage, phase, STAGES)
    let_kernel_after_start()


@gluon.jit(do_not_specialize=["M", "N", "steps", "tiles"])
def _w4a16_digits_ring(
    words_desc,  # bytes of the words [N/64 K/128 32, 128]
    digits_desc,  # bytes of the digits [K/128 4 R, 128]
    facts_desc,  # of the rows in each step [K/128 4 R]
    scales_desc,  # [N/64 G 64]
    offsets_desc,  # [N/64 G 64], read if has_offsets
    bias_ptr,  # [N], read if has_bias
    y_ptr,  # [M, N]
    partials_ptr,  # sums of parts of K
    counters_ptr,  # zero, one for each 64 outputs
    M,
    N,
    steps,
    tiles,
    TILE: gl.constexpr,  # a LinearRingTile
    FORMAT: gl.constexpr,  # a LinearFormat
):
    STAGES: gl.constexpr = TILE.stages
    R: gl.constexpr = TILE.rows
    words = gl.allocate_shared_memory(gl.int8, [STAGES * PARTS, 32, 128], words_desc.layout)
    digits = gl.allocate_shared_memory(gl.int8, [STAGES, 4 * R, 128], digits_desc.layout)
    facts = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * R], facts_desc.layout)
    scales = gl.allocate_shared_memory(scales_desc.dtype, [STAGES * PARTS, 64], scales_desc.layout)
    if FORMAT.has_offsets:
        offsets = gl.allocate_shared_memory(
            offsets_desc.dtype, [STAGES * PARTS, 64], offsets_desc.layout
        )
    else:
        offsets = scales
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=PARTS)
    fence_async_shared()
    descs = (words_desc, digits_desc, facts_desc, scales_desc, offsets_desc)
    rings = (words, digits, facts, scales, offsets, full, empty)
    pointers = (bias_ptr, y_ptr, partials_ptr, counters_ptr)
    sizes = (M, N, steps, tiles)
    gl.warp_specialize(
        [
            (_multiply, (rings, pointers, sizes, 0, TILE, FORMAT)),
            (_multiply, (rings, pointers, sizes, 1, TILE, FORMAT)),
            (_copy, (descs, rings, sizes, TILE, FORMAT)),
        ],
        [4, 1],
        [MULTIPLY_REGISTERS, COPY_REGISTERS],
    )
