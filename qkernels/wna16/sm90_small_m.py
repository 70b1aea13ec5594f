"""W4A16 of up to 64 rows on sm_90, in Gluon: y^T = W x^T on wgmma. Knows no file format.

One warp copies words, scales and x of some steps ahead into a ring in shared memory. Two warpgroups
multiply 64 outputs each: codes less their zero, exact in 16 bits, from registers, x from shared
memory. The scale multiplies the sum of a step, which for few rows is cheaper than to scale each
weight, as sm90_large_m.py does.

Legend: M rows of x, R rows that a tile has place for; K inputs, N outputs, G groups; a step is 128
inputs, a tile 128 outputs; a unit is a part of a tile's steps.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from qkernels.gpu.device import sm_count
from qkernels.gpu.gluon_compat import aggregate, descriptor, integer, tma_load
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl_gluon import griddepcontrol_wait, launch_dependents
from qkernels.gpu.pipeline import Pipeline, make_pipeline
from qkernels.gpu.split_k_reduce import reduce_in_last_arriver
from qkernels.gpu.tma import aligned
from qkernels.gpu.workspace import workspace
from qkernels.linear.prepared import PreparedWeight
from qkernels.wna16.dequant import load_pieces, rows_layout
from qkernels.wna16.dequant_int4 import codes_in_full, exact_codes, zeros_to_subtract
from qkernels.wna16.layout import TILE_N
from qkernels.wna16.numerics import weight_numerics
from qkernels.wna16.sm90_small_m_config import SmallMConfig

SLICE = 64  # inputs of one copy of x: 128 bytes, the widest swizzle
WORDS_BOX = [32, 32]  # a stored tile's words of a step, in rows of 128 bytes
NUM_CONSUMERS = gl.constexpr(2)  # warpgroups that multiply, 64 outputs of a tile each


def run(
    x_MK: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None,
    config: SmallMConfig,
) -> torch.Tensor:
    """x [M, K], contiguous, to [M, N]. For groups of 128 n."""
    y_MN = x_MK.new_empty(x_MK.shape[0], weight.out_features)
    _launch(x_MK, weight, bias, config, y_MN, unreduced=False)
    return y_MN


def run_split_k(
    x_MK: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None,
    config: SmallMConfig,
) -> torch.Tensor:
    """`linear` before its parts of K are added: float32 [split, M, N], to be added in order."""
    parts_SMN = torch.empty(
        (config.split, x_MK.shape[0], weight.out_features), dtype=torch.float32, device=x_MK.device
    )
    _launch(x_MK, weight, bias, config, parts_SMN, unreduced=True)
    return parts_SMN


def _launch(
    x_MK: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None,
    config: SmallMConfig,
    y: torch.Tensor,
    unreduced: bool,
) -> None:
    x_MK = aligned(x_MK)
    M, K = x_MK.shape
    N = weight.out_features
    partials, counters = workspace(x_MK.device)
    scales, offsets = weight.tensors["scales"], weight.tensors.get("offsets")
    units = config.tiles(N) * config.split
    with on_device(x_MK):
        launch(
            _w4a16_ring,
            (min(units, config.blocks_of_sm * sm_count(x_MK.device)),),
            descriptor(weight.tensors["words"].view(-1, WORDS_BOX[1]), WORDS_BOX),
            descriptor(x_MK, [config.rows, SLICE]),
            descriptor(scales.view(-1), [TILE_N]),
            descriptor((scales if offsets is None else offsets).view(-1), [TILE_N]),
            scales if bias is None else bias,
            y,
            partials,
            counters,
            M,
            N,
            K // 128,
            config.tiles(N),
            TILE=config,
            FORMAT=weight_numerics(weight, bias),
            UNREDUCED=unreduced,
            num_warps=4,
            maxnreg=config.registers,
            launch_pdl=True,
        )


@aggregate
class _Operands:
    """TMA descriptors of what the producer loads."""

    words: tma.tensor_descriptor
    x: tma.tensor_descriptor
    scales: tma.tensor_descriptor
    offsets: tma.tensor_descriptor


@aggregate
class _Stages:
    """Shared memory: of each stage words, scales and offsets by consumer, x by 64 inputs."""

    words: gl.shared_memory_descriptor  # [stages * NUM_CONSUMERS, 32, 32]
    x: gl.shared_memory_descriptor  # [stages * 2, R, 64]
    scales: gl.shared_memory_descriptor  # [stages * NUM_CONSUMERS, 64]
    offsets: gl.shared_memory_descriptor  # the same, or `scales` where there are none


@aggregate
class _Results:
    """What the epilogue reads and writes."""

    bias_ptr: gl.tensor
    y_ptr: gl.tensor
    partials_ptr: gl.tensor
    counters_ptr: gl.tensor


@aggregate
class _Sizes:
    M: integer
    N: integer
    k_steps: integer
    tiles: integer


@aggregate
class _WorkTile:
    """What a block does at a time: a tile's K steps from begin to end, one split of K."""

    tile: gl.tensor
    split: gl.tensor
    begin: gl.tensor
    end: gl.tensor

    @gluon.jit
    def stored_tile(self, WHICH: gl.constexpr):
        """The 64 outputs of a consumer."""
        return self.tile * NUM_CONSUMERS + WHICH


@gluon.jit
def _work_tile(index, k_steps, SPLIT: gl.constexpr):
    split = index % SPLIT
    return _WorkTile(
        tile=index // SPLIT,
        split=split,
        begin=split * k_steps // SPLIT,
        end=(split + 1) * k_steps // SPLIT,
    )


@gluon.jit
def _product(
    stages, stage, WHICH: gl.constexpr, TILE: gl.constexpr, FORMAT: gl.constexpr, SUMS: gl.constexpr
):
    """Sums [64, R] of a step's codes less their zero, times x. On return they are on their way.

    A product goes on reading its left registers after it has been issued: each has its own.
    """
    DTYPE: gl.constexpr = stages.x.dtype
    R: gl.constexpr = TILE.rows
    PIECE: gl.constexpr = TILE.piece
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    OUTPUTS: gl.constexpr = rows_layout(PIECE, 4)
    own = stage * NUM_CONSUMERS + WHICH
    if FORMAT.has_offsets:
        offset = stages.offsets.index(own).load(OUTPUTS)
    else:
        offset = gl.full([64], FORMAT.offset, DTYPE, OUTPUTS)
    less = zeros_to_subtract(offset, DTYPE)
    pieces = load_pieces(stages.words.index(own), PIECE, 4)
    sums = gl.zeros([64, R], gl.float32, SUMS)
    for i in gl.static_range(128 // PIECE):
        left = gl.convert_layout(exact_codes(pieces[i], less, DTYPE), LEFT, assert_trivial=True)
        x = stages.x.index(2 * stage + i * PIECE // 64)
        if PIECE < 64:
            x = x.slice(i * PIECE % 64, PIECE, dim=1)
        sums = warpgroup_mma(left, x.permute([1, 0]), sums, use_acc=i > 0, is_async=True)
    return sums


@gluon.jit
def _multiply(
    pipeline: Pipeline,
    results: _Results,
    sizes: _Sizes,
    WHICH: gl.constexpr,
    TILE: gl.constexpr,
    FORMAT: gl.constexpr,
    UNREDUCED: gl.constexpr,
):
    """One warpgroup: its 64 outputs of each tile, and their results."""
    stages = pipeline.mem
    R: gl.constexpr = TILE.rows
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 16])
    state = pipeline.consumer_start()
    for index in range(gl.program_id(0), sizes.tiles * TILE.split, gl.num_programs(0)):
        work = _work_tile(index, sizes.k_steps, TILE.split)
        sums = gl.zeros([64, R], gl.float32, SUMS)
        for _ in range(work.begin, work.end):
            pipeline.consumer_wait(state)
            own = state.stage * NUM_CONSUMERS + WHICH
            scale = stages.scales.index(own).load(gl.SliceLayout(1, SUMS))
            scale = codes_in_full(scale.to(gl.float32), stages.x.dtype)
            product = _product(stages, state.stage, WHICH, TILE, FORMAT, SUMS)
            product = warpgroup_mma_wait(0, deps=[product])
            pipeline.consumer_release(state)
            sums += product * scale[:, None]
            state = state.advance()
        if FORMAT.has_bias:
            sums += _bias(results, sizes, work.stored_tile(WHICH), work.split, SUMS)[:, None]
        if UNREDUCED:
            _store_partials(sums, results, sizes, work.stored_tile(WHICH), work.split)
        else:
            _finish(sums, results, sizes, work.stored_tile(WHICH), work.split, TILE)


@gluon.jit
def _bias(results, sizes, place, split, SUMS: gl.constexpr):
    """Of the 64 outputs of a place, in float32, for the first split; 0 for others."""
    n = place * 64 + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    bias = gl.load(results.bias_ptr + gl.minimum(n, sizes.N - 1)).to(gl.float32)
    return gl.where(split == 0, bias, 0.0)


@gluon.jit
def _store_partials(sums, results, sizes, place, split):
    """A warpgroup's sums [64, R] as they are: 8 outputs of a row, 32 bytes, at a time.

    Through shared memory it would be 16 bytes of a lane, and 0.1 to 1.3 us later.
    """
    M = sizes.M
    N = sizes.N
    SUMS: gl.constexpr = sums.type.layout
    n = place * 64 + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    m = gl.arange(0, sums.shape[1], gl.SliceLayout(0, SUMS))
    inside = (n < N)[:, None] & (m < M)[None, :]
    rows = (results.y_ptr + split * M * N) + n
    gl.store(rows[:, None] + (m * N)[None, :], sums, mask=inside)


@gluon.jit
def _finish(sums, results, sizes, place, split, TILE: gl.constexpr):
    """A warpgroup's sums [64, R] to y. Of parts of K, the last to come adds all in order."""
    last = True
    if TILE.split > 1:
        sums, last = reduce_in_last_arriver(
            sums, place, split, results.partials_ptr, results.counters_ptr, TILE.split
        )
    if last:
        values = sums.to(results.y_ptr.dtype.element_ty)
        _store(values, results.y_ptr, place * 64, sizes.M, sizes.N)


@gluon.jit
def _store(values, y_ptr, first, M, N):
    """Values [64 outputs, R] to y, 8 or 16 bytes of a row at a time."""
    R: gl.constexpr = values.shape[1]
    S: gl.constexpr = 4 if R == 8 else 8
    ALONG_N: gl.constexpr = gl.BlockedLayout([S, 1], [64 // S, S // 2], [1, 4], [0, 1])
    values = gl.convert_layout(values, ALONG_N)
    n = first + gl.arange(0, 64, gl.SliceLayout(1, ALONG_N))
    m = gl.arange(0, R, gl.SliceLayout(0, ALONG_N))
    inside = (n < N)[:, None] & (m < M)[None, :]
    gl.store(y_ptr + m[None, :] * N + n[:, None], values, mask=inside)


@gluon.jit
def _load_weight(operands, pipeline, state, sizes, tile, step, pred, FORMAT: gl.constexpr):
    """A step's words and scales into a stage, which is told to expect x, too."""
    OFFSETS: gl.constexpr = operands.offsets.block_type.nbytes if FORMAT.has_offsets else 0
    OF_CONSUMER: gl.constexpr = (
        operands.words.block_type.nbytes + operands.scales.block_type.nbytes + OFFSETS
    )
    stages = pipeline.mem
    bar = pipeline.full_barrier(state)
    NUM_BYTES: gl.constexpr = NUM_CONSUMERS * OF_CONSUMER + 2 * operands.x.block_type.nbytes
    pipeline.producer_expect(state, NUM_BYTES, pred)
    for i in gl.static_range(NUM_CONSUMERS):
        # beyond the last stored tile: the last, whose results go nowhere
        stored = gl.minimum(tile * NUM_CONSUMERS + i, (sizes.N + 63) // 64 - 1)
        own = state.stage * NUM_CONSUMERS + i
        row = (stored * sizes.k_steps + step) * 32
        tma_load(operands.words, [row, 0], bar, stages.words.index(own), pred=pred)
        group = stored * (sizes.k_steps // FORMAT.steps_of_group) + step // FORMAT.steps_of_group
        tma_load(operands.scales, [group * 64], bar, stages.scales.index(own), pred=pred)
        if FORMAT.has_offsets:
            tma_load(operands.offsets, [group * 64], bar, stages.offsets.index(own), pred=pred)


@gluon.jit
def _load(
    operands: _Operands,
    pipeline: Pipeline,
    sizes: _Sizes,
    TILE: gl.constexpr,
    FORMAT: gl.constexpr,
):
    """The producer warp: waits for a stage to be empty, and fills it by TMA."""
    # weights never change: their share of the first stages needs no wait for the kernel before
    first = _work_tile(gl.program_id(0), sizes.k_steps, TILE.split)
    started = gl.minimum(first.end - first.begin, TILE.stages)
    for i in range(started):
        state = pipeline.producer_start(i)
        _load_weight(operands, pipeline, state, sizes, first.tile, first.begin + i, True, FORMAT)
    if TILE.launch_early:
        launch_dependents()
    griddepcontrol_wait()
    state = pipeline.producer_start()
    count = 0
    for index in range(gl.program_id(0), sizes.tiles * TILE.split, gl.num_programs(0)):
        work = _work_tile(index, sizes.k_steps, TILE.split)
        for step in range(work.begin, work.end):
            pipeline.producer_acquire(state)
            _load_weight(
                operands, pipeline, state, sizes, work.tile, step, count >= started, FORMAT
            )
            for half in gl.static_range(2):
                tma_load(
                    operands.x,
                    [0, step * 128 + half * 64],
                    pipeline.full_barrier(state),
                    pipeline.mem.x.index(2 * state.stage + half),
                )
            count += 1
            state = state.advance()
    if not TILE.launch_early:
        launch_dependents()


@gluon.jit(do_not_specialize=["M", "steps", "tiles"])
def _w4a16_ring(
    words_desc,  # of the words [N/64 K/128 32, 32]
    x_desc,  # of x [M, K], blocks [R, 64]
    scales_desc,  # [N/64 G 64]
    offsets_desc,  # [N/64 G 64], read if has_offsets
    bias_ptr,  # [N], read if has_bias
    y_ptr,  # [M, N]; of parts that stay apart float32 [split, M, N]
    partials_ptr,  # sums of parts of K
    counters_ptr,  # zero, one for each 64 outputs
    M,
    N,
    steps,
    tiles,
    TILE: gl.constexpr,  # a SmallMConfig
    FORMAT: gl.constexpr,  # a WeightNumerics
    UNREDUCED: gl.constexpr,  # parts of K are left to whoever reads y
):
    STAGES: gl.constexpr = TILE.stages
    SLOTS: gl.constexpr = STAGES * NUM_CONSUMERS
    words = gl.allocate_shared_memory(gl.int32, [SLOTS, 32, 32], words_desc.layout)
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 2, TILE.rows, 64], x_desc.layout)
    scales = gl.allocate_shared_memory(scales_desc.dtype, [SLOTS, 64], scales_desc.layout)
    if FORMAT.has_offsets:
        offsets = gl.allocate_shared_memory(offsets_desc.dtype, [SLOTS, 64], offsets_desc.layout)
    else:
        offsets = scales
    stages = _Stages(words=words, x=xs, scales=scales, offsets=offsets)
    pipeline = make_pipeline(stages, STAGES, NUM_CONSUMERS)
    fence_async_shared()
    operands = _Operands(words=words_desc, x=x_desc, scales=scales_desc, offsets=offsets_desc)
    results = _Results(
        bias_ptr=bias_ptr, y_ptr=y_ptr, partials_ptr=partials_ptr, counters_ptr=counters_ptr
    )
    sizes = _Sizes(M=M, N=N, k_steps=steps, tiles=tiles)
    gl.warp_specialize(
        [
            (_multiply, (pipeline, results, sizes, 0, TILE, FORMAT, UNREDUCED)),
            (_multiply, (pipeline, results, sizes, 1, TILE, FORMAT, UNREDUCED)),
            (_load, (operands, pipeline, sizes, TILE, FORMAT)),
        ],
        [4, 1],
        [TILE.multiply_registers, TILE.copy_registers],
    )
