"""A K step of up to 64 rows on sm_90, in Gluon: shared memory of a stage, its loads, its products.

A consumer multiplies one stored tile. Operand A is in registers: codes minus zero points, exact in
16 bits, or scaled weights. Operand B is x, in shared memory. The argument `gemm` needs the
constexprs CONFIG and NUMERICS. For the producer it also needs the descriptors of weight, x, scales
and offsets, `k_steps`, and `loaded_tile(work_tile, CONSUMER)`, which returns the stored tile.

Legend: BM rows of x; a K step is 128 inputs, which are several stored K steps if groups have 64 or
32 inputs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from qkernels.gpu.gluon_compat import aggregate, tma_load
from qkernels.wna16.dequant import (
    codes_minus_zeros,
    group_factors,
    load_k_subtiles,
    load_row_words,
    load_words,
    rounded_factors,
    rows_layout,
    scale_of_codes,
    unpack_groups,
    unpack_rounded,
    zeros_to_subtract,
)
from qkernels.wna16.unpack.sm90_fp4 import fp4_scales, unpack_fp4

X_BOX_K = 64  # inputs of one TMA box of x: 128 bytes, the widest swizzle
WEIGHT_BOX = [32, 32]  # packed words of a stored tile in one K step, in rows of 128 bytes


@aggregate
class Stages:
    """Shared memory of the pipeline. A stage has CONFIG.num_consumers slots, one per consumer."""

    weight: gl.shared_memory_descriptor  # [slots, 32, 32]
    x: gl.shared_memory_descriptor  # [stages * 2, BM, 64]
    # [slots, 64 stored_steps]; with several groups int32 words by row
    scales: gl.shared_memory_descriptor
    # [slots, 64 stored_steps], valid if has_offsets; or d, dmin of blocks
    offsets: gl.shared_memory_descriptor


@gluon.jit
def allocate_stages(weight, x, scales, offsets, CONFIG: gl.constexpr, NUMERICS: gl.constexpr):
    """Allocate the pipeline's shared memory for the boxes that the TMA descriptors load."""
    SLOTS: gl.constexpr = CONFIG.stages * CONFIG.num_consumers
    packed_stages = gl.allocate_shared_memory(gl.int32, [SLOTS, 32, 32], weight.layout)
    x_stages = gl.allocate_shared_memory(x.dtype, [CONFIG.stages * 2, CONFIG.block_m, 64], x.layout)
    SCALES: gl.constexpr = scales.block_type.shape[0]
    scale_stages = gl.allocate_shared_memory(scales.dtype, [SLOTS, SCALES], scales.layout)
    if NUMERICS.has_offsets or NUMERICS.steps_per_block > 0:
        OFFSETS: gl.constexpr = offsets.block_type.shape[0]
        offset_stages = gl.allocate_shared_memory(offsets.dtype, [SLOTS, OFFSETS], offsets.layout)
    else:
        offset_stages = scale_stages
    return Stages(weight=packed_stages, x=x_stages, scales=scale_stages, offsets=offset_stages)


@gluon.jit
def load_weight(gemm, pipeline, state, work_tile, k_step, pred):
    """Load a K step's packed weights and scales. Makes the stage expect the bytes of x, too."""
    NUMERICS: gl.constexpr = gemm.NUMERICS
    CONSUMERS: gl.constexpr = gemm.CONFIG.num_consumers
    HAS_BLOCKS: gl.constexpr = NUMERICS.steps_per_block > 0
    OFFSET_BYTES: gl.constexpr = (
        gemm.offsets.block_type.nbytes if NUMERICS.has_offsets or HAS_BLOCKS else 0
    )
    SCALES: gl.constexpr = gemm.scales.block_type.shape[0]
    STEPS: gl.constexpr = NUMERICS.stored_steps
    CONSUMER_BYTES: gl.constexpr = (
        gemm.weight.block_type.nbytes + gemm.scales.block_type.nbytes + OFFSET_BYTES
    )
    BYTES: gl.constexpr = CONSUMERS * CONSUMER_BYTES + 2 * gemm.x.block_type.nbytes
    stages = pipeline.mem
    barrier = pipeline.full_barrier(state)
    pipeline.producer_expect(state, BYTES, pred)
    for i in gl.static_range(CONSUMERS):
        stored_tile = gemm.loaded_tile(work_tile, i)
        own = state.stage * CONSUMERS + i
        if STEPS > 1:
            # The last K step may have fewer groups. The next tile's codes and scales that it loads
            # too are multiplied by zeros, because x has no such inputs.
            groups = gemm.x.shape[1] // (128 // STEPS)
            group = stored_tile * groups + k_step * STEPS
            row = group * (32 // STEPS)
        else:
            row = (stored_tile * gemm.k_steps + k_step) * 32
        tma_load(gemm.weight, [row, 0], barrier, stages.weight.index(own), pred=pred)
        if STEPS > 1:
            first_scale = group * 64
        else:
            groups = gemm.k_steps // NUMERICS.steps_per_group
            group = stored_tile * groups + k_step // NUMERICS.steps_per_group
            first_scale = group * SCALES
        tma_load(gemm.scales, [first_scale], barrier, stages.scales.index(own), pred=pred)
        if NUMERICS.has_offsets:
            tma_load(gemm.offsets, [group * 64], barrier, stages.offsets.index(own), pred=pred)
        if HAS_BLOCKS:
            blocks = gemm.k_steps // NUMERICS.steps_per_block
            block = stored_tile * blocks + k_step // NUMERICS.steps_per_block
            tma_load(gemm.offsets, [block * 64], barrier, stages.offsets.index(own), pred=pred)


@gluon.jit
def load_x(gemm, pipeline, state, row, k_step):
    """Load a K step of BM rows of x."""
    for i in gl.static_range(2):
        k = k_step * 128 + i * 64
        box = pipeline.mem.x.index(2 * state.stage + i)
        tma_load(gemm.x, [row, k], pipeline.full_barrier(state), box)


@gluon.jit
def step_scales(gemm, stages, stage, CONSUMER: gl.constexpr, SUMS: gl.constexpr):
    """Load the scales for the sums of `multiply`, float32 [64]."""
    own = stage * gemm.CONFIG.num_consumers + CONSUMER
    scale = stages.scales.index(own).load(gl.SliceLayout(1, SUMS))
    return scale_of_codes(scale.to(gl.float32), stages.x.dtype)


@gluon.jit
def _offsets(gemm, stages, own, ROWS: gl.constexpr):
    """Return the offsets of a stored tile's rows [64]; a symmetric weight has one constant."""
    if gemm.NUMERICS.has_offsets:
        return stages.offsets.index(own).load(ROWS)
    else:
        return gl.full([64], gemm.NUMERICS.offset, stages.x.dtype, ROWS)


@gluon.jit
def _x_subtile(stages, stage, i: gl.constexpr, K_SUBTILE: gl.constexpr):
    """Return operand B of a K step's i-th wgmma: [K_SUBTILE, BM]."""
    x = stages.x.index(2 * stage + i * K_SUBTILE // 64)
    if K_SUBTILE < 64:
        x = x.slice(i * K_SUBTILE % 64, K_SUBTILE, dim=1)
    return x.permute([1, 0])


@gluon.jit
def multiply(gemm, stages, stage, CONSUMER: gl.constexpr, SUMS: gl.constexpr):
    """Issue a K step's products: sums [64, BM] of codes minus zero points, times x.

    A wgmma reads operand A's registers after it was issued, so each wgmma has its own registers.
    """
    DTYPE: gl.constexpr = stages.x.dtype
    BM: gl.constexpr = gemm.CONFIG.block_m
    K_SUBTILE: gl.constexpr = gemm.CONFIG.k_subtile
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROWS: gl.constexpr = rows_layout(K_SUBTILE, 4)
    own = stage * gemm.CONFIG.num_consumers + CONSUMER
    offset = _offsets(gemm, stages, own, ROWS)
    zeros = zeros_to_subtract(offset, DTYPE)
    packed = load_k_subtiles(stages.weight.index(own), K_SUBTILE, 4)
    sums = gl.zeros([64, BM], gl.float32, SUMS)
    for i in gl.static_range(128 // K_SUBTILE):
        a = gl.convert_layout(codes_minus_zeros(packed[i], zeros, DTYPE), A, assert_trivial=True)
        x = _x_subtile(stages, stage, i, K_SUBTILE)
        sums = warpgroup_mma(a, x, sums, use_acc=i > 0, is_async=True)
    return sums


@gluon.jit
def multiply_by_group(
    gemm,
    stages,
    stage,
    FIRST: gl.constexpr,
    COUNT: gl.constexpr,
    CONSUMER: gl.constexpr,
    SUMS: gl.constexpr,
):
    """Issue the products of COUNT groups of 64 or 32 inputs, from number FIRST of a K step on.

    Return for each group the sums [64, BM] of codes minus zero points, times x, and the scales,
    float32 [64], by which they must be multiplied.
    """
    DTYPE: gl.constexpr = stages.x.dtype
    BM: gl.constexpr = gemm.CONFIG.block_m
    STEPS: gl.constexpr = gemm.NUMERICS.stored_steps
    GROUP: gl.constexpr = 128 // STEPS
    C: gl.constexpr = 4 // STEPS
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROWS: gl.constexpr = rows_layout(GROUP, 4)
    own = stage * gemm.CONFIG.num_consumers + CONSUMER
    sums, scales = (), ()
    for i in gl.static_range(FIRST, FIRST + COUNT):
        if gemm.NUMERICS.has_offsets:
            offset = stages.offsets.index(own).slice(64 * i, 64).load(ROWS)
        else:
            offset = gl.full([64], gemm.NUMERICS.offset, DTYPE, ROWS)
        packed = load_words(stages.weight.index(own).slice(8 * C * i, 8 * C), C)
        codes = codes_minus_zeros(packed, zeros_to_subtract(offset, DTYPE), DTYPE)
        a = gl.convert_layout(codes, A, assert_trivial=True)
        x = _x_subtile(stages, stage, i, GROUP)
        zeros = gl.zeros([64, BM], gl.float32, SUMS)
        sums += (warpgroup_mma(a, x, zeros, use_acc=False, is_async=True),)
        scale = stages.scales.index(own).slice(64 * i, 64).load(gl.SliceLayout(1, SUMS))
        scales += (scale_of_codes(scale.to(gl.float32), DTYPE),)
    return sums, scales


@gluon.jit
def multiply_scaled(gemm, stages, stage, sums, CONSUMER: gl.constexpr, SUMS: gl.constexpr):
    """Issue a K step's products: sums [64, BM] plus scaled weights times x.

    Up to a power of two, the weights are the same as in sm90_large_m.py, and so is the order of
    additions. The scales have been rounded to x's dtype.
    """
    NUMERICS: gl.constexpr = gemm.NUMERICS
    DTYPE: gl.constexpr = stages.x.dtype
    K_SUBTILE: gl.constexpr = gemm.CONFIG.k_subtile
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROWS: gl.constexpr = rows_layout(K_SUBTILE, 4)
    own = stage * gemm.CONFIG.num_consumers + CONSUMER
    offset = _offsets(gemm, stages, own, ROWS)
    scale = stages.scales.index(own).load(ROWS)
    row_factors = rounded_factors(scale, offset, NUMERICS, DTYPE)
    packed = load_k_subtiles(stages.weight.index(own), K_SUBTILE, 4)
    for i in gl.static_range(128 // K_SUBTILE):
        a = unpack_rounded(packed[i], row_factors, NUMERICS, DTYPE, A)
        x = _x_subtile(stages, stage, i, K_SUBTILE)
        sums = warpgroup_mma(a, x, sums, is_async=True)
    return sums


@gluon.jit
def multiply_groups(gemm, stages, stage, sums, CONSUMER: gl.constexpr, SUMS: gl.constexpr):
    """Issue a K step's products like multiply_scaled; each group has a scale and a minimum.

    Up to a power of two, the weights equal KWeight.dequantize bit for bit.
    """
    NUMERICS: gl.constexpr = gemm.NUMERICS
    DTYPE: gl.constexpr = stages.x.dtype
    K_SUBTILE: gl.constexpr = gemm.CONFIG.k_subtile
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    own = stage * gemm.CONFIG.num_consumers + CONSUMER
    scales = load_row_words(stages.scales.index(own), stages.scales.shape[1] // 64)
    blocks = scales
    if NUMERICS.steps_per_block > 0:
        blocks = load_row_words(stages.offsets.index(own), 1)
    packed = load_k_subtiles(stages.weight.index(own), K_SUBTILE, 4)
    for i in gl.static_range(128 // K_SUBTILE):
        scale, minimum = group_factors(scales, blocks[0], i, K_SUBTILE, NUMERICS, DTYPE)
        a = unpack_groups(packed[i], scale, minimum, DTYPE, A)
        x = _x_subtile(stages, stage, i, K_SUBTILE)
        sums = warpgroup_mma(a, x, sums, is_async=True)
    return sums


@gluon.jit
def multiply_fp4(gemm, stages, stage, sums, CONSUMER: gl.constexpr, SUMS: gl.constexpr):
    """Issue a K step's products of 4-bit floats.

    They are exact; the outputs' factors (fp4_layout.py) are not yet applied.
    """
    FP4: gl.constexpr = gemm.NUMERICS.fp4
    DTYPE: gl.constexpr = stages.x.dtype
    K_SUBTILE: gl.constexpr = gemm.CONFIG.k_subtile
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    own = stage * gemm.CONFIG.num_consumers + CONSUMER
    scales = load_row_words(stages.scales.index(own), FP4.parts)
    packed = load_k_subtiles(stages.weight.index(own), K_SUBTILE, 4)
    for i in gl.static_range(128 // K_SUBTILE):
        first = fp4_scales(scales[0], i, K_SUBTILE, FP4)
        second = first
        if FP4.parts == 2:
            second = fp4_scales(scales[1], i, K_SUBTILE, FP4)
        a = unpack_fp4(packed[i], first, second, FP4, DTYPE, A)
        x = _x_subtile(stages, stage, i, K_SUBTILE)
        sums = warpgroup_mma(a, x, sums, is_async=True)
    return sums
