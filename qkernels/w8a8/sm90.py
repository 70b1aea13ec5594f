"""y = x W^T with 8-bit weights and 8-bit activations, for sm_90 alone, in Gluon.

The same sums and the same rounding as w8a8.py. A block keeps its place on an SM and takes one tile
after another. One of its warps does nothing but start the bulk copies, as far ahead as the ring of
stages allows; one to three warpgroups multiply, each its own rows of the left operand, and store
them while the next tile is copied already. Where weights cannot fill the SMs, parts of K go to
different blocks: they meet and share the result's columns, or of few columns the last adds up.

Legend: M rows of x, K inputs, N outputs. Left and right: the operands of the warpgroup product,
weight and x or x and weight; BL, BR rows of them in a tile, PART rows of BL for each warpgroup.
"""

from dataclasses import replace

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from formats.weights import Weight
from qkernels.gpu.config import ceil_div
from qkernels.gpu.device import sm_count
from qkernels.gpu.gluon_compat import descriptor, tma_load
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl_gluon import griddepcontrol_wait, launch_dependents
from qkernels.gpu.pipeline import new_barriers
from qkernels.gpu.registers import split_columns
from qkernels.gpu.split_k_reduce import reduce_in_last_arriver, reduce_scatter
from qkernels.gpu.workspace import workspace
from qkernels.linear.by_codes import linear_by_codes
from qkernels.linear.prepared import PreparedWeight
from qkernels.rowwise.quantize import quantize_input
from qkernels.tuning.table import tuning_table_of
from qkernels.w8a8 import triton_gemm as w8a8
from qkernels.w8a8.config import (
    INT8_HOPPER_BOX,
    SM90_BLOCK_K,
    W8A8Sm90Config,
    default_sm90_config,
)
from qkernels.w8a8.sm90_epilogue import factors_ahead, store
from qkernels.w8a8.tuned import TUNED

BOX = gl.constexpr(INT8_HOPPER_BOX)

# of pieces of the result where a part has idle rows: 64 outputs of a row of y, 128 bytes
IDLE_PIECES = gl.constexpr(
    gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
)


def prepare_weight(
    packed: Weight, dtype: torch.dtype, device: torch.device | str | None = None
) -> PreparedWeight:
    """As w8a8.prepare_weight, codes in the order of `in_boxes`."""
    weight = w8a8.prepare_weight(packed, dtype, device)
    tensors = {**weight.tensors, "codes": in_boxes(weight.tensors["codes"])}
    return replace(weight, kernel="hopper_w8a8", tensors=tensors)


def in_boxes(codes_NK: torch.Tensor) -> torch.Tensor:
    """Codes [N/64, K/128, 64, 128], both rounded up: what a copy takes lies side by side.

    Zeros fill up. Code (n, k) is at [n // 64, k // 128, n % 64, k % 128].
    """
    N, K = codes_NK.shape
    box = INT8_HOPPER_BOX
    rows, steps = ceil_div(N, box), ceil_div(K, SM90_BLOCK_K)
    bytes_NK = codes_NK.view(torch.int8)
    if (rows * box, steps * SM90_BLOCK_K) != (N, K):
        padded = bytes_NK.new_zeros(rows * box, steps * SM90_BLOCK_K)
        padded[:N, :K] = bytes_NK
        bytes_NK = padded
    boxes = bytes_NK.view(rows, box, steps, SM90_BLOCK_K).transpose(1, 2)
    return boxes.contiguous().view(codes_NK.dtype)


def linear(
    x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [..., K] to [..., N]: rounded to codes, multiplied, rounded once to x's dtype."""
    return linear_by_codes(x, weight, bias, quantize_input, linear_codes)


def linear_codes(
    codes_MK: torch.Tensor,
    scales_M1: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None = None,
    zeros_M1: torch.Tensor | None = None,
    *,
    tile: W8A8Sm90Config | None = None,
) -> torch.Tensor:
    """As ops.linear_codes; equal inputs, equal bits. `tile` replaces that of w8a8/config.py."""
    (M, K), N = codes_MK.shape, weight.out_features
    device, integers = codes_MK.device, codes_MK.dtype == torch.int8
    y_MN = torch.empty((M, N), dtype=weight.dtype, device=device)
    if M == 0:
        return y_MN
    blocks = weight.tensors["scales"].ndim == 2
    kind = "blocks" if blocks else weight.activation.type if zeros_M1 is None else "asymmetric"
    tile = tile or _chosen_tile(device, M, N, K, kind)
    codes_MK = codes_MK.contiguous()
    x_rows = tile.block_right if tile.weight_left else tile.part
    x = descriptor(codes_MK, [x_rows, SM90_BLOCK_K])
    boxes = weight.tensors["codes"].view(-1, SM90_BLOCK_K)
    boxes = descriptor(boxes, [tile.weight_box, SM90_BLOCK_K])
    scales_N = weight.tensors["scales"]
    partials, counters = workspace(device)
    places = sm_count(device) * tile.blocks_per_sm
    assert tile.fits(M, N, sm_count(device)), tile
    with on_device(codes_MK):
        launch(
            _w8a8_hopper,
            (min(places, tile.tiles(M, N) * tile.split),),
            boxes,
            x,
            _result(y_MN, tile),
            scales_M1.contiguous(),
            scales_N,
            scales_N if bias is None else bias,
            counters if zeros_M1 is None else zeros_M1.contiguous(),
            counters if zeros_M1 is None else weight.tensors["sums"],
            partials.view(torch.int32) if integers else partials,
            counters,
            M,
            N,
            K,
            TILE=tile,
            HAS_BIAS=bias is not None,
            HAS_ZEROS=zeros_M1 is not None,
            BLOCKS=blocks,
            num_warps=4,
            maxnreg=tile.registers,
            launch_pdl=True,
        )
    return y_MN


def _result(y_MN: torch.Tensor, tile: W8A8Sm90Config) -> TensorDescriptor:
    """Where pieces of the result go. What idle rows gave lies beyond the end of a part: cut off."""
    if not tile.weight_left:
        return descriptor(y_MN, [tile.part, tile.store_width])
    if not tile.idle_rows:
        return descriptor(y_MN, [tile.store_width, tile.part])
    (M, N), rows = y_MN.shape, tile.part_rows
    parts = y_MN.as_strided((N // rows, M, rows), (rows, N, 1))
    return descriptor(parts, [1, tile.store_width, tile.part])


def _chosen_tile(device: torch.device, M: int, N: int, K: int, kind: str) -> W8A8Sm90Config:
    """A tile measured on this GPU, else the choice of w8a8/config.py.

    A table says nothing of zero points or blocks. Of the SMs it says what somebody wrote: parts of
    K that do not all run at once would wait for each other for good.
    """
    sms = sm_count(device)
    if kind in ("int", "float"):
        row = tuning_table_of(device).find(TUNED, N=N, K=K, integers=kind == "int", M=M)
        if (
            row is not None
            and isinstance(row.config, W8A8Sm90Config)
            and row.config.fits(M, N, sms)
        ):
            return row.config
    return default_sm90_config(M, N, K, sms, kind)


@gluon.jit
def _place(unit, tiles_left, tiles_right, steps, TILE: gl.constexpr):
    """(left tile, right tile, first step, end of steps) of one unit of work.

    Blocks that run together share rows of both operands, so that both stay in the L2.
    """
    SPLIT: gl.constexpr = TILE.split
    LEFT_OF_GROUP: gl.constexpr = TILE.left_of_group
    tile, part = unit // SPLIT, unit % SPLIT
    group = tile // (LEFT_OF_GROUP * tiles_right)
    height = gl.minimum(tiles_left - group * LEFT_OF_GROUP, LEFT_OF_GROUP)
    inside = tile % (LEFT_OF_GROUP * tiles_right)
    tile_left = group * LEFT_OF_GROUP + inside % height
    return tile_left, inside // height, part * steps // SPLIT, (part + 1) * steps // SPLIT


@gluon.jit
def _copy_weight(operands, rings, sizes, tile, step, stage, pred, TILE: gl.constexpr):
    """A step's weight rows of a tile, into the buffers of its side."""
    weight, _, _ = operands
    left_bufs, right_bufs, _, _, full, _ = rings
    _, _, _, _, steps = sizes
    ROWS: gl.constexpr = weight.block_type.shape[0]
    PARTS: gl.constexpr = TILE.parts if TILE.weight_left else 1
    COPIES: gl.constexpr = (TILE.part_rows if TILE.weight_left else TILE.block_right) // ROWS
    OF_BOX: gl.constexpr = BOX // ROWS
    for i in gl.static_range(PARTS):
        buf = left_bufs.index(stage * PARTS + i) if TILE.weight_left else right_bufs.index(stage)
        for j in gl.static_range(COPIES):
            copy = (tile * PARTS + i) * COPIES + j
            row = ((copy // OF_BOX * steps + step) * OF_BOX + copy % OF_BOX) * ROWS
            place = buf.slice(j * ROWS, ROWS, dim=0)
            tma_load(weight, [row, 0], full.index(stage), place, pred=pred)


@gluon.jit
def _copy(operands, rings, sizes, TILE: gl.constexpr):
    """The warp that starts all copies: wait for a stage to be free, fill it, tell `full`."""
    _, x, _ = operands
    left_bufs, right_bufs, _, _, full, empty = rings
    _, _, tiles_left, tiles_right, steps = sizes
    PART: gl.constexpr = TILE.part
    PARTS: gl.constexpr = TILE.parts
    BR: gl.constexpr = TILE.block_right
    BK: gl.constexpr = x.block_type.shape[1]
    STAGES: gl.constexpr = TILE.stages
    FIRST: gl.constexpr = TILE.first_stages
    WEIGHT_LEFT: gl.constexpr = TILE.weight_left
    BYTES: gl.constexpr = (PARTS * TILE.part_rows + BR) * BK
    first = gl.program_id(0)
    units = tiles_left * tiles_right * TILE.split
    # weights never change: their share of the first stages needs no wait for the kernel before
    tile_left, tile_right, begin, end = _place(first, tiles_left, tiles_right, steps, TILE)
    started = gl.minimum(end - begin, FIRST)
    for stage in range(started):
        mbarrier.expect(full.index(stage), BYTES)
        tile = tile_left if WEIGHT_LEFT else tile_right
        _copy_weight(operands, rings, sizes, tile, begin + stage, stage, True, TILE)
    griddepcontrol_wait()
    stage = 0
    phase = 1
    count = 0
    for unit in range(first, units, gl.num_programs(0)):
        tile_left, tile_right, begin, end = _place(unit, tiles_left, tiles_right, steps, TILE)
        for step in range(begin, end):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            fresh = count >= started
            mbarrier.expect(bar, BYTES, pred=fresh)
            tile = tile_left if WEIGHT_LEFT else tile_right
            _copy_weight(operands, rings, sizes, tile, step, stage, fresh, TILE)
            if WEIGHT_LEFT:
                tma_load(x, [tile_right * BR, step * BK], bar, right_bufs.index(stage))
            else:
                for i in gl.static_range(PARTS):
                    row = (tile_left * PARTS + i) * PART
                    tma_load(x, [row, step * BK], bar, left_bufs.index(stage * PARTS + i))
            count += 1
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
    launch_dependents()


@gluon.jit
def _free(empty, stage, pred, STAGES: gl.constexpr):
    """Tell the copying warp that this warpgroup has read the stage before `stage`."""
    before = gl.where(stage == 0, STAGES - 1, stage - 1)
    mbarrier.arrive(empty.index(before), count=1, pred=pred)


@gluon.jit
def _multiply(
    operands,
    rings,
    pointers,
    sizes,
    WHICH: gl.constexpr,
    TILE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    BLOCKS: gl.constexpr,
):
    """One warpgroup: the products of its rows of the left operand, and their results."""
    left_bufs, right_bufs, _, _, full, empty = rings
    _, _, _, _, _, partials_ptr, counters_ptr = pointers
    _, _, tiles_left, tiles_right, steps = sizes
    SUM: gl.constexpr = partials_ptr.dtype.element_ty
    PART: gl.constexpr = TILE.part
    PARTS: gl.constexpr = TILE.parts
    BR: gl.constexpr = TILE.block_right
    SPLIT: gl.constexpr = TILE.split
    STAGES: gl.constexpr = TILE.stages
    STEPS_OF_SUM: gl.constexpr = TILE.steps_of_sum
    SHARE: gl.constexpr = TILE.share
    PIECES: gl.constexpr = BR // TILE.store_width
    # triton has the integer instruction for up to 224 columns
    columns: gl.constexpr = min(BR, 128)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32])
    units = tiles_left * tiles_right * TILE.split
    griddepcontrol_wait()
    stage = 0
    phase = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        tile_left, tile_right, begin, end = _place(unit, tiles_left, tiles_right, steps, TILE)
        row = (tile_left * PARTS + WHICH) * TILE.part_rows
        column = tile_right * BR
        # of a tile whose parts meet, this block stores some columns
        stored = column + unit % SPLIT * SHARE if TILE.reduce_scatter else column
        sums = gl.zeros([PART, BR], SUM, layout)
        piece: gl.constexpr = split_columns(sums, PIECES)[0].type.layout
        # from memory while the product runs
        factors = factors_ahead(pointers, sizes, row, stored, TILE, HAS_BIAS, BLOCKS, piece)
        if STEPS_OF_SUM == 0:
            for step in range(begin, end):
                mbarrier.wait(full.index(stage), phase)
                left = left_bufs.index(stage * PARTS + WHICH)
                right = right_bufs.index(stage).permute((1, 0))
                sums = warpgroup_mma(left, right, sums, is_async=True, use_acc=step > begin)
                sums = warpgroup_mma_wait(1, deps=[sums])
                _free(empty, stage, step > begin, STAGES)
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1
            sums = warpgroup_mma_wait(0, deps=[sums])
            _free(empty, stage, end > begin, STAGES)
        else:
            # the tensor core keeps 14 bits of a float8 sum: it is emptied into a float32 one
            for first in range(begin, end, STEPS_OF_SUM):
                part = gl.zeros([PART, BR], SUM, layout)
                last = gl.minimum(end, first + STEPS_OF_SUM)
                for step in range(first, last):
                    mbarrier.wait(full.index(stage), phase)
                    left = left_bufs.index(stage * PARTS + WHICH)
                    right = right_bufs.index(stage).permute((1, 0))
                    part = warpgroup_mma(left, right, part, is_async=True, use_acc=step > first)
                    part = warpgroup_mma_wait(1, deps=[part])
                    _free(empty, stage, step > first, STAGES)
                    stage += 1
                    if stage == STAGES:
                        stage = 0
                        phase ^= 1
                if BLOCKS:
                    scales = _scales_of_step(pointers, sizes, row, column, first, TILE, layout)
                part = warpgroup_mma_wait(0, deps=[part])
                _free(empty, stage, True, STAGES)
                if BLOCKS:
                    part = part * gl.expand_dims(scales, 0 if TILE.weight_left else 1)
                sums += part
        complete = True
        if TILE.reduce_scatter:
            place = unit // SPLIT * PARTS + WHICH
            sums = reduce_scatter(sums, place, unit % SPLIT, partials_ptr, counters_ptr, SPLIT)
        elif SPLIT > 1:
            # the warpgroups of one part of the output meet at one counter, one slot for each
            place = unit // SPLIT * PARTS + WHICH
            sums, complete = reduce_in_last_arriver(
                sums, place, unit % SPLIT, partials_ptr, counters_ptr, SPLIT
            )
        if complete:
            store(
                operands,
                rings,
                pointers,
                sizes,
                sums,
                factors,
                row,
                stored,
                WHICH,
                TILE,
                HAS_BIAS,
                HAS_ZEROS,
                BLOCKS,
            )
    tma.store_wait(0)


@gluon.jit
def _scales_of_step(pointers, sizes, row, column, step, TILE: gl.constexpr, layout: gl.constexpr):
    """For x and weight with a scale for each 128 inputs: their products, one for each row of x.

    A warpgroup's rows of the left operand, and the columns of a tile, lie in one block of the
    weight.
    """
    input_scales_ptr, scales_ptr, _, _, _, _, _ = pointers
    M, _, _, _, steps = sizes
    if TILE.weight_left:
        m = column + gl.arange(0, TILE.block_right, gl.SliceLayout(0, layout))
        block = row // 128
    else:
        m = row + gl.arange(0, TILE.part, gl.SliceLayout(1, layout))
        block = column // 128
    m = gl.minimum(m, M - 1)
    input_scales = gl.load(input_scales_ptr + m.to(gl.int64) * steps + step)
    return input_scales * gl.load(scales_ptr + block * steps + step)


@gluon.jit(do_not_specialize=["M"])
def _w8a8_hopper(
    weight,  # descriptor of the weight's codes [N/64 K/128 64, 128], blocks [weight_box, 128]
    x,  # descriptor of x's codes [M, K]
    y,  # descriptor of the result [M, N], with idle rows [N / part_rows, M, part_rows]
    input_scales_ptr,  # [M], of BLOCKS [M, K / 128]
    scales_ptr,  # [N], of BLOCKS [N / 128, K / 128]
    bias_ptr,  # [N], read if HAS_BIAS
    zeros_ptr,  # [M], read if HAS_ZEROS: x is scale * (code - zero)
    weight_sums_ptr,  # [N], of the weight's codes, read if HAS_ZEROS
    partials_ptr,  # a slot for every part of every tile, if SPLIT > 1
    counters_ptr,  # zero, one for each warpgroup's share of a tile
    M,
    N,
    K,
    TILE: gl.constexpr,  # a W8A8Sm90Config
    HAS_BIAS: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    BLOCKS: gl.constexpr,  # a scale for each 128 inputs of x, and for each 128 x 128 of the weight
):
    PART: gl.constexpr = TILE.part
    PARTS: gl.constexpr = TILE.parts
    BR: gl.constexpr = TILE.block_right
    BK: gl.constexpr = x.block_type.shape[1]
    STAGES: gl.constexpr = TILE.stages
    WEIGHT_LEFT: gl.constexpr = TILE.weight_left
    steps = gl.cdiv(K, BK)
    tiles_left = gl.cdiv(N if WEIGHT_LEFT else M, PARTS * TILE.part_rows)
    tiles_right = gl.cdiv(M if WEIGHT_LEFT else N, BR)
    # one layout for both: rows of 128 bytes in the widest swizzle
    left_bufs = gl.allocate_shared_memory(x.dtype, [STAGES * PARTS, PART, BK], x.layout)
    right_bufs = gl.allocate_shared_memory(x.dtype, [STAGES, BR, BK], x.layout)
    PIECE: gl.constexpr = y.block_type.shape[-2:]
    PIECES: gl.constexpr = IDLE_PIECES if TILE.idle_rows else y.layout
    y_bufs = gl.allocate_shared_memory(y.dtype, [PARTS * TILE.stores, PIECE[0], PIECE[1]], PIECES)
    full, empty = new_barriers(STAGES, READERS=PARTS)
    fence_async_shared()
    operands = (weight, x, y)
    # scales and biases of a tile's columns, for each warpgroup
    factor_bufs = gl.allocate_shared_memory(
        gl.float32,
        [PARTS * TILE.column_factors, TILE.share if TILE.factors_in_shared else 1],
        gl.SwizzledSharedLayout(1, 1, 1, [0]),
    )
    rings = (left_bufs, right_bufs, y_bufs, factor_bufs, full, empty)
    pointers = (input_scales_ptr, scales_ptr, bias_ptr, zeros_ptr, weight_sums_ptr)
    pointers += (partials_ptr, counters_ptr)
    sizes = (M, N, tiles_left, tiles_right, steps)
    REGISTERS: gl.constexpr = TILE.consumer_registers
    if PARTS == 1:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (operands, rings, pointers, sizes, 0, TILE, HAS_BIAS, HAS_ZEROS, BLOCKS),
                ),
                (_copy, (operands, rings, sizes, TILE)),
            ],
            [1],
            [24],
        )
    elif PARTS == 2:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (operands, rings, pointers, sizes, 0, TILE, HAS_BIAS, HAS_ZEROS, BLOCKS),
                ),
                (
                    _multiply,
                    (operands, rings, pointers, sizes, 1, TILE, HAS_BIAS, HAS_ZEROS, BLOCKS),
                ),
                (_copy, (operands, rings, sizes, TILE)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (operands, rings, pointers, sizes, 0, TILE, HAS_BIAS, HAS_ZEROS, BLOCKS),
                ),
                (
                    _multiply,
                    (operands, rings, pointers, sizes, 1, TILE, HAS_BIAS, HAS_ZEROS, BLOCKS),
                ),
                (
                    _multiply,
                    (operands, rings, pointers, sizes, 2, TILE, HAS_BIAS, HAS_ZEROS, BLOCKS),
                ),
                (_copy, (operands, rings, sizes, TILE)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )
