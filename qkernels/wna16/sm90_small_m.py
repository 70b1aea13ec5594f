"""W4A16 for up to 64 rows on sm_90, in Gluon: y^T = W x^T with wgmma.

A persistent, warp-specialized kernel. One producer warp keeps TMA loads of packed weights, scales
and x in flight in a multistage pipeline. Two consumer warpgroups multiply 64 outputs each: operand
A is codes minus zero points, exact in 16 bits and in registers; operand B is x, in shared memory.

The scales multiply the sums of a K step. With few rows this costs less than scaling each weight, as
sm90_large_m.py does; with `scales_weights` this kernel also scales each weight, for the same bits
as sm90_large_m.py. Split-K sums are reduced by the last split to arrive, or by the consumer of the
result.

Legend: M rows of x, K inputs, N outputs, G groups; BM rows of a tile, at least M. A tile has 128
outputs, two stored tiles of 64; a K step is 128 inputs.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma_wait,
)

from qkernels.gpu.config import ceil_div
from qkernels.gpu.device import sm_count
from qkernels.gpu.gluon_compat import aggregate, descriptor, integer
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl_gluon import griddepcontrol_wait, launch_dependents
from qkernels.gpu.pipeline import make_pipeline
from qkernels.gpu.split_k_reduce import reduce_in_last_arriver
from qkernels.gpu.tma import aligned
from qkernels.gpu.workspace import workspace
from qkernels.linear.prepared import PreparedWeight
from qkernels.lora.sm90_term import LoraTermArguments, lora_term, prefetch_term, term_of_tile
from qkernels.lora.term import LoraTerm, term_arguments, term_parts
from qkernels.operands.limbs import K_STEP
from qkernels.wna16.dequant import rescale_rounded
from qkernels.wna16.layout import TILE_N, GroupedSpec
from qkernels.wna16.prepack import weight_numerics
from qkernels.wna16.sm90_k_step import (
    WEIGHT_BOX,
    X_BOX_K,
    allocate_stages,
    load_weight,
    load_x,
    multiply,
    multiply_fp4,
    multiply_groups,
    multiply_scaled,
    step_scales,
)
from qkernels.wna16.sm90_small_m_config import SmallMConfig


def run(
    x_MK: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None,
    config: SmallMConfig,
    term: LoraTerm | None = None,
    y_MN: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply contiguous x [M, K] to [M, N], and add the adapters' term.

    Groups must be divisible by 128. The result is written to `y_MN` if it is given.
    """
    if y_MN is None:
        y_MN = x_MK.new_empty(x_MK.shape[0], weight.out_features)
    _launch(x_MK, weight, bias, config, term, y_MN, unreduced=False)
    return y_MN


def run_split_k(
    x_MK: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None,
    config: SmallMConfig,
    term: LoraTerm | None = None,
) -> torch.Tensor:
    """Run without the reduction: return float32 [split, M, N], which the consumer adds in order."""
    partials_SMN = torch.empty(
        (config.split, x_MK.shape[0], weight.out_features), dtype=torch.float32, device=x_MK.device
    )
    _launch(x_MK, weight, bias, config, term, partials_SMN, unreduced=True)
    return partials_SMN


def _launch(
    x_MK: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None,
    config: SmallMConfig,
    term: LoraTerm | None,
    y: torch.Tensor,
    unreduced: bool,
) -> None:
    x_MK = aligned(x_MK)
    M, K = x_MK.shape
    N = weight.out_features
    partials, counters = workspace(x_MK.device)
    scales, offsets = _boxes(weight)
    assert config.scales_weights or not isinstance(weight.spec, GroupedSpec)
    max_blocks = config.blocks_per_sm * sm_count(x_MK.device)
    with on_device(x_MK):
        launch(
            _wna16_small_m,
            (min(max_blocks, config.tiles(N) * config.split),),
            descriptor(weight.tensors["packed"].view(-1, WEIGHT_BOX[1]), WEIGHT_BOX),
            descriptor(x_MK, [config.block_m, X_BOX_K]),
            scales,
            offsets,
            weight.tensors["scales"] if bias is None else bias,
            weight.tensors.get("blocks", y),
            y,
            partials,
            counters,
            M,
            N,
            ceil_div(K, K_STEP),
            config.tiles(N),
            term_arguments(term),
            PARTS=term_parts(term),
            CONFIG=config,
            NUMERICS=weight_numerics(weight, bias),
            UNREDUCED=unreduced,
            num_warps=4,
            maxnreg=config.registers,
            launch_pdl=True,
        )


def _boxes(weight: PreparedWeight) -> tuple[object, object]:
    """Return TMA descriptors of a K step's scales, and of its offsets or a block's d and dmin.

    With several groups per K step, both are int32 words by row. 4-bit floats have only scales.
    """
    scales, spec = weight.tensors["scales"], weight.spec
    if not isinstance(spec, GroupedSpec):  # one scale per K step
        offsets = weight.tensors.get("offsets", scales)
        return descriptor(scales.view(-1), [TILE_N]), descriptor(offsets.view(-1), [TILE_N])
    row_words = scales.view(-1).view(torch.int32)
    words_per_step = TILE_N * scales[0, 0, 0].numel() * scales.itemsize // 4
    boxes = descriptor(row_words, [words_per_step])
    if not spec.block:
        return boxes, boxes
    return boxes, descriptor(weight.tensors["blocks"].view(-1).view(torch.int32), [TILE_N])


@aggregate
class _WorkTile:
    """One split of one tile."""

    tile: gl.tensor
    split: gl.tensor
    NUM_CONSUMERS: gl.constexpr
    k_begin: gl.tensor  # in K steps
    k_end: gl.tensor

    @gluon.jit
    def stored_tile(self, CONSUMER: gl.constexpr):
        return self.tile * self.NUM_CONSUMERS + CONSUMER


@aggregate
class _Gemm:
    """Arguments of the kernel."""

    weight: tma.tensor_descriptor  # packed [N/64 K/128 32, 32]
    x: tma.tensor_descriptor  # [M, K], boxes [BM, 64]
    scales: tma.tensor_descriptor  # [N/64 G 64]
    offsets: tma.tensor_descriptor  # [N/64 G 64], valid if has_offsets
    bias_ptr: gl.tensor  # [N], valid if has_bias
    factors_ptr: gl.tensor  # float32 [N], valid with fp4
    y_ptr: gl.tensor  # [M, N]; UNREDUCED: float32 [split, M, N]
    partials_ptr: gl.tensor  # one slot per stored tile
    counters_ptr: gl.tensor  # zeros, one per stored tile
    M: integer
    N: integer
    k_steps: integer
    tiles: integer
    term: LoraTermArguments
    CONFIG: gl.constexpr  # SmallMConfig
    NUMERICS: gl.constexpr  # WeightNumerics
    UNREDUCED: gl.constexpr  # the consumer of y adds the splits

    @gluon.jit
    def num_work_tiles(self):
        return self.tiles * self.CONFIG.split

    @gluon.jit
    def work_tile(self, work):
        SPLIT: gl.constexpr = self.CONFIG.split
        split = work % SPLIT
        return _WorkTile(
            tile=work // SPLIT,
            split=split,
            NUM_CONSUMERS=self.CONFIG.num_consumers,
            k_begin=split * self.k_steps // SPLIT,
            k_end=(split + 1) * self.k_steps // SPLIT,
        )

    @gluon.jit
    def loaded_tile(self, work_tile, CONSUMER: gl.constexpr):
        """Return the stored tile to load. Tiles after the last repeat it and are not stored."""
        return gl.minimum(work_tile.stored_tile(CONSUMER), (self.N + 63) // 64 - 1)


@gluon.jit
def _consume(gemm, pipeline, CONSUMER: gl.constexpr):
    """Run a consumer warpgroup, which computes and stores 64 outputs of each work tile."""
    stages = pipeline.mem
    BM: gl.constexpr = gemm.CONFIG.block_m
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    state = pipeline.consumer_start()
    if gemm.term.PARTS > 0:
        work_tile = gemm.work_tile(gl.program_id(0))
        tile = work_tile.stored_tile(CONSUMER)
        prefetch_term(gemm.term, tile, gemm.M, gemm.N, work_tile.split, gemm.CONFIG.split)
        griddepcontrol_wait()  # the previous kernel writes h, like x
    for work in range(gl.program_id(0), gemm.num_work_tiles(), gl.num_programs(0)):
        work_tile = gemm.work_tile(work)
        sums = gl.zeros([64, BM], gl.float32, SUMS)
        if gemm.term.PARTS > 0:
            sums = _term(gemm, work, CONSUMER, SUMS)
        for _ in range(work_tile.k_begin, work_tile.k_end):
            pipeline.consumer_wait(state)
            if gemm.NUMERICS.fp4 is not None:
                sums = multiply_fp4(gemm, stages, state.stage, sums, CONSUMER, SUMS)
                sums = warpgroup_mma_wait(0, deps=[sums])
                pipeline.consumer_release(state)
            elif gemm.NUMERICS.groups > 1:
                sums = multiply_groups(gemm, stages, state.stage, sums, CONSUMER, SUMS)
                sums = warpgroup_mma_wait(0, deps=[sums])
                pipeline.consumer_release(state)
            elif gemm.CONFIG.scales_weights:
                sums = multiply_scaled(gemm, stages, state.stage, sums, CONSUMER, SUMS)
                sums = warpgroup_mma_wait(0, deps=[sums])
                pipeline.consumer_release(state)
            else:
                scale = step_scales(gemm, stages, state.stage, CONSUMER, SUMS)
                product = multiply(gemm, stages, state.stage, CONSUMER, SUMS)
                product = warpgroup_mma_wait(0, deps=[product])
                pipeline.consumer_release(state)
                sums += product * scale[:, None]
            state = state.advance()
        _epilogue(gemm, sums, work_tile, CONSUMER)


@gluon.jit
def _term(gemm, work, CONSUMER: gl.constexpr, SUMS: gl.constexpr):
    """Return the LoRA term of this split's adapters, for the sums [64, BM]."""
    BM: gl.constexpr = gemm.CONFIG.block_m
    SPLIT: gl.constexpr = gemm.CONFIG.split
    work_tile = gemm.work_tile(work)
    # An opaque zero: it keeps the compiler from hoisting values that depend on it out of the loop
    # over work tiles, where they would take registers or spill.
    zero = work >> 30
    tile = work_tile.stored_tile(CONSUMER)
    return term_of_tile(gemm.term, tile, gemm.M, gemm.N, zero, work_tile.split, SPLIT, BM, SUMS)


@gluon.jit
def _epilogue(gemm, sums, work_tile, CONSUMER: gl.constexpr):
    """Store a consumer's sums [64, BM] plus the bias to y: unreduced, or reduced and rounded.

    The first split adds the bias. With `scales_weights` and a reduction here, the bias is added to
    the reduced sum, as in sm90_large_m.py.
    """
    SPLIT: gl.constexpr = gemm.CONFIG.split
    BIAS_LAST: gl.constexpr = gemm.CONFIG.scales_weights and not gemm.UNREDUCED
    if gemm.CONFIG.scales_weights and gemm.UNREDUCED:
        sums = _rescaled(gemm, sums, work_tile.stored_tile(CONSUMER))
    if gemm.NUMERICS.has_bias:
        n = work_tile.stored_tile(CONSUMER) * 64
        n += gl.arange(0, 64, gl.SliceLayout(1, sums.type.layout))
        bias = gl.load(gemm.bias_ptr + gl.minimum(n, gemm.N - 1)).to(gl.float32)
        if not BIAS_LAST:
            sums += gl.where(work_tile.split == 0, bias, 0.0)[:, None]
    if gemm.UNREDUCED:
        _store_partials(gemm, sums, work_tile.stored_tile(CONSUMER), work_tile.split)
    else:
        complete = True
        if SPLIT > 1:
            sums, complete = reduce_in_last_arriver(
                sums,
                work_tile.stored_tile(CONSUMER),
                work_tile.split,
                gemm.partials_ptr,
                gemm.counters_ptr,
                SPLIT,
            )
        if complete:
            if gemm.CONFIG.scales_weights:
                sums = _rescaled(gemm, sums, work_tile.stored_tile(CONSUMER))
            if gemm.NUMERICS.has_bias and BIAS_LAST:
                sums += bias[:, None]
            values = sums.to(gemm.y_ptr.dtype.element_ty)
            _store(gemm, values, work_tile.stored_tile(CONSUMER))


@gluon.jit
def _rescaled(gemm, sums, stored_tile):
    """Remove the power of two from sums [64, BM] of scaled weights, or apply outputs' factors."""
    if gemm.NUMERICS.fp4 is not None:
        n = stored_tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, sums.type.layout))
        return sums * gl.load(gemm.factors_ptr + gl.minimum(n, gemm.N - 1))[:, None]
    else:
        return rescale_rounded(sums, gemm.NUMERICS, gemm.x.dtype)


@gluon.jit
def _store_partials(gemm, sums, stored_tile, split):
    """Store sums [64, BM] in the accumulator's layout: 8 outputs of a row (32 bytes) at a time.

    A conversion through shared memory to 16 bytes per lane takes 0.1 to 1.3 us longer.
    """
    SUMS: gl.constexpr = sums.type.layout
    n = stored_tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    m = gl.arange(0, sums.shape[1], gl.SliceLayout(0, SUMS))
    mask = (n < gemm.N)[:, None] & (m < gemm.M)[None, :]
    ptrs = (gemm.y_ptr + split * gemm.M * gemm.N) + n
    gl.store(ptrs[:, None] + (m * gemm.N)[None, :], sums, mask=mask)


@gluon.jit
def _store(gemm, values, stored_tile):
    """Store values [64, BM] to y, 8 or 16 bytes of a row at a time."""
    BM: gl.constexpr = values.shape[1]
    PER_THREAD: gl.constexpr = 4 if BM == 8 else 8
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [PER_THREAD, 1], [64 // PER_THREAD, PER_THREAD // 2], [1, 4], [0, 1]
    )
    values = gl.convert_layout(values, LAYOUT)
    n = stored_tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    m = gl.arange(0, BM, gl.SliceLayout(0, LAYOUT))
    mask = (n < gemm.N)[:, None] & (m < gemm.M)[None, :]
    gl.store(gemm.y_ptr + m[None, :] * gemm.N + n[:, None], values, mask=mask)


@gluon.jit
def _load(gemm, pipeline):
    """Run the producer warp, which loads all K steps of the block's work tiles."""
    CONFIG: gl.constexpr = gemm.CONFIG
    # weights never change, so their loads into the first stages do not wait for the previous kernel
    work_tile = gemm.work_tile(gl.program_id(0))
    prefetched = gl.minimum(work_tile.k_end - work_tile.k_begin, CONFIG.stages)
    for stage in range(prefetched):
        state = pipeline.producer_start(stage)
        load_weight(gemm, pipeline, state, work_tile, work_tile.k_begin + stage, True)
    if CONFIG.launch_dependents_first:
        launch_dependents()
    griddepcontrol_wait()
    state = pipeline.producer_start()
    loaded = 0
    for work in range(gl.program_id(0), gemm.num_work_tiles(), gl.num_programs(0)):
        work_tile = gemm.work_tile(work)
        for k_step in range(work_tile.k_begin, work_tile.k_end):
            pipeline.producer_acquire(state)
            load_weight(gemm, pipeline, state, work_tile, k_step, loaded >= prefetched)
            load_x(gemm, pipeline, state, 0, k_step)
            loaded += 1
            state = state.advance()
    if not CONFIG.launch_dependents_first:
        launch_dependents()


@gluon.jit(do_not_specialize=["M", "k_steps", "tiles"])
def _wna16_small_m(
    weight,  # as in _Gemm
    x,
    scales,
    offsets,
    bias_ptr,
    factors_ptr,
    y_ptr,
    partials_ptr,
    counters_ptr,
    M,
    N,
    k_steps,
    tiles,
    lora,  # TermArguments
    PARTS: gl.constexpr,
    CONFIG: gl.constexpr,
    NUMERICS: gl.constexpr,
    UNREDUCED: gl.constexpr,
):
    stages = allocate_stages(weight, x, scales, offsets, CONFIG, NUMERICS)
    pipeline = make_pipeline(stages, CONFIG.stages, CONFIG.num_consumers)
    fence_async_shared()
    term = lora_term(lora, PARTS)
    gemm = _Gemm(
        weight=weight,
        x=x,
        scales=scales,
        offsets=offsets,
        bias_ptr=bias_ptr,
        factors_ptr=factors_ptr,
        y_ptr=y_ptr,
        partials_ptr=partials_ptr,
        counters_ptr=counters_ptr,
        M=M,
        N=N,
        k_steps=k_steps,
        tiles=tiles,
        term=term,
        CONFIG=CONFIG,
        NUMERICS=NUMERICS,
        UNREDUCED=UNREDUCED,
    )
    CONSUMER: gl.constexpr = CONFIG.consumer_registers
    PRODUCER: gl.constexpr = CONFIG.producer_registers
    if CONFIG.num_consumers == 1:
        gl.warp_specialize(
            [
                (_consume, (gemm, pipeline, 0)),
                (_load, (gemm, pipeline)),
            ],
            [1],
            [PRODUCER],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (gemm, pipeline, 0)),
                (_consume, (gemm, pipeline, 1)),
                (_load, (gemm, pipeline)),
            ],
            [4, 1],
            [CONSUMER, PRODUCER],
        )
