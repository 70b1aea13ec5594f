"""A K step of up to 64 rows on sm_90, in Gluon: what a consumer warpgroup does with one stage.

Knows neither who fills the stages nor what becomes of the sums. A consumer multiplies one stored
tile: operand A is codes minus zero points, exact in 16 bits and in registers; operand B is x, in
shared memory. `gemm` has the constexprs CONFIG and NUMERICS.

Legend: BM rows of x; a K step is 128 inputs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from qkernels.gpu.gluon_compat import aggregate
from qkernels.wna16.dequant import (
    codes_minus_zeros,
    load_k_subtiles,
    rows_layout,
    scale_of_codes,
    zeros_to_subtract,
)

X_BOX_K = 64  # inputs of one TMA box of x: 128 bytes, the widest swizzle
WEIGHT_BOX = [32, 32]  # a stored tile's packed words of a K step, in rows of 128 bytes


@aggregate
class Stages:
    """Shared memory of the pipeline. A stage has a slot for each consumer, CONFIG.num_consumers."""

    weight: gl.shared_memory_descriptor  # [slots, 32, 32]
    x: gl.shared_memory_descriptor  # [stages * 2, BM, 64]
    scales: gl.shared_memory_descriptor  # [slots, 64]
    offsets: gl.shared_memory_descriptor  # [slots, 64], valid if has_offsets


@gluon.jit
def step_scales(gemm, stages, stage, CONSUMER: gl.constexpr, SUMS: gl.constexpr):
    """What the sums of `multiply` are to be multiplied by, float32 [64]."""
    own = stage * gemm.CONFIG.num_consumers + CONSUMER
    scale = stages.scales.index(own).load(gl.SliceLayout(1, SUMS))
    return scale_of_codes(scale.to(gl.float32), stages.x.dtype)


@gluon.jit
def multiply(gemm, stages, stage, CONSUMER: gl.constexpr, SUMS: gl.constexpr):
    """Issues a K step's products: sums [64, BM] of codes minus zero points, times x.

    A wgmma goes on reading operand A's registers after it was issued, so each has its own.
    """
    NUMERICS: gl.constexpr = gemm.NUMERICS
    DTYPE: gl.constexpr = stages.x.dtype
    BM: gl.constexpr = gemm.CONFIG.block_m
    K_SUBTILE: gl.constexpr = gemm.CONFIG.k_subtile
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROWS: gl.constexpr = rows_layout(K_SUBTILE, 4)
    own = stage * gemm.CONFIG.num_consumers + CONSUMER
    if NUMERICS.has_offsets:
        offset = stages.offsets.index(own).load(ROWS)
    else:
        offset = gl.full([64], NUMERICS.offset, DTYPE, ROWS)
    zeros = zeros_to_subtract(offset, DTYPE)
    packed = load_k_subtiles(stages.weight.index(own), K_SUBTILE, 4)
    sums = gl.zeros([64, BM], gl.float32, SUMS)
    for i in gl.static_range(128 // K_SUBTILE):
        a = gl.convert_layout(codes_minus_zeros(packed[i], zeros, DTYPE), A, assert_trivial=True)
        x = stages.x.index(2 * stage + i * K_SUBTILE // 64)
        if K_SUBTILE < 64:
            x = x.slice(i * K_SUBTILE % 64, K_SUBTILE, dim=1)
        sums = warpgroup_mma(a, x.permute([1, 0]), sums, use_acc=i > 0, is_async=True)
    return sums
