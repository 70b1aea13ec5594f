"""Gluon functions that sum the products of a work tile for one consumer warpgroup of w4a8/sm90.py.

They differ in what runs while the tensor core multiplies. All give the same bits: the sum of a
group is exact (integers) or the tensor core's own (float8), and groups are added in order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from qkernels.gpu.pipeline import PipelineState
from qkernels.w4a8.sm90_codes import (
    expand,
    expand_multiples,
    load_multiples,
    load_words,
    split_k,
)


@gluon.jit
def multiply_integers(gemm, pipeline, state, sums, work_tile, CONSUMER: gl.constexpr):
    """Return the integer sums over all K steps of a work tile, and the next pipeline state."""
    A: gl.constexpr = gl.DotOperandLayout(0, sums.type.layout, 4)
    for k_step in range(work_tile.k_begin, work_tile.k_end):
        pipeline.consumer_wait(state)
        slot = state.stage * gemm.CONFIG.num_consumers + CONSUMER
        a = expand(load_words(pipeline.mem.weight.index(slot)), pipeline.mem.x.dtype, A)
        x = pipeline.mem.x.index(state.stage).permute((1, 0))
        sums = warpgroup_mma(a, x, sums, is_async=True, use_acc=k_step > work_tile.k_begin)
        # the product reads operand A's registers until it has ended
        sums = warpgroup_mma_wait(0, deps=[sums])
        pipeline.consumer_release(state)
        state = state.advance()
    return sums, state


@gluon.jit
def multiply_multiples(gemm, pipeline, state, sums, work_tile, CONSUMER: gl.constexpr):
    """Same as multiply_integers for codes times the multiple of their group."""
    GROUPS: gl.constexpr = gemm.NUMERICS.groups
    A: gl.constexpr = gl.DotOperandLayout(0, sums.type.layout, 4)
    BK: gl.constexpr = 128 // GROUPS
    for k_step in range(work_tile.k_begin, work_tile.k_end):
        pipeline.consumer_wait(state)
        slot = state.stage * gemm.CONFIG.num_consumers + CONSUMER
        words = split_k(load_words(pipeline.mem.weight.index(slot)), GROUPS)
        for i in gl.static_range(GROUPS):
            multiples = load_multiples(pipeline.mem.scales.index(slot).slice(i * 64, 64))
            a = expand_multiples(words[i], multiples, A)
            x = pipeline.mem.x.index(state.stage)
            if GROUPS > 1:
                x = x.slice(i * BK, BK, dim=1)
            use_acc = True if i > 0 else k_step > work_tile.k_begin
            sums = warpgroup_mma(a, x.permute((1, 0)), sums, is_async=True, use_acc=use_acc)
        # the products read operand A's registers until they have ended
        sums = warpgroup_mma_wait(0, deps=[sums])
        pipeline.consumer_release(state)
        state = state.advance()
    return sums, state


@gluon.jit
def multiply_groups(gemm, pipeline, state, total, work_tile, CONSUMER: gl.constexpr):
    """Return `total` plus the scaled sums of each group of a work tile, and the next state.

    A K step has one or more groups, or a part of one. Each has a separate sum: exact for integers;
    for float8 the tensor core keeps 14 bits.
    """
    NUMERICS: gl.constexpr = gemm.NUMERICS
    GROUPS: gl.constexpr = NUMERICS.groups
    DTYPE: gl.constexpr = pipeline.mem.x.dtype
    PRODUCT: gl.constexpr = gl.int32 if DTYPE.is_int8() else gl.float32
    LAYOUT: gl.constexpr = total.type.layout
    A: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 4)
    BK: gl.constexpr = 128 // GROUPS
    for _ in range(work_tile.k_begin, work_tile.k_end):
        pipeline.consumer_wait(state)
        slot = state.stage * gemm.CONFIG.num_consumers + CONSUMER
        words = split_k(load_words(pipeline.mem.weight.index(slot)), GROUPS)
        for i in gl.static_range(GROUPS):
            if NUMERICS.in_groups:
                scale = pipeline.mem.scales.index(slot).slice(i * 64, 64)
                scale = scale.load(gl.SliceLayout(1, LAYOUT)).to(gl.float32) / NUMERICS.factor
            a = expand(words[i], DTYPE, A)
            x = pipeline.mem.x.index(state.stage)
            if GROUPS > 1:
                x = x.slice(i * BK, BK, dim=1)
            product = gl.zeros(total.shape, PRODUCT, LAYOUT)
            product = warpgroup_mma(a, x.permute((1, 0)), product, is_async=True, use_acc=False)
            product = warpgroup_mma_wait(0, deps=[product])
            if i == GROUPS - 1:
                pipeline.consumer_release(state)
            if NUMERICS.in_groups:
                total = gl.fma(product.to(gl.float32), scale[:, None], total)
            else:
                total += product
        state = state.advance()
    return total, state


@gluon.jit
def _weights_at(gemm, pipeline, state, LAYOUT: gl.constexpr, CONSUMER: gl.constexpr):
    """Wait for the K step at `state`. Return its packed words and scales."""
    pipeline.consumer_wait(state)
    slot = state.stage * gemm.CONFIG.num_consumers + CONSUMER
    words = load_words(pipeline.mem.weight.index(slot))
    if gemm.NUMERICS.in_groups:
        scale = pipeline.mem.scales.index(slot).load(gl.SliceLayout(1, LAYOUT))
        return words, scale.to(gl.float32) / gemm.NUMERICS.factor
    else:
        return words, gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, LAYOUT))


@gluon.jit
def _ahead(state, is_last):
    """Return the next state, and the state to load words at: after the last step, its own again."""
    following = state.advance()
    ahead = PipelineState(
        stage=gl.where(is_last, state.stage, following.stage),
        phase=gl.where(is_last, state.phase, following.phase),
        num_stages=state.num_stages,
    )
    return following, ahead


@gluon.jit
def _add(product, scale, total, IN_GROUPS: gl.constexpr):
    """Return the total plus the product, scaled by row if groups have scales."""
    if IN_GROUPS:
        return gl.fma(product.to(gl.float32), scale[:, None], total)
    else:
        return total + product


@gluon.jit
def multiply_ahead(gemm, pipeline, state, total, work_tile, CONSUMER: gl.constexpr):
    """Same as multiply_groups for one group per K step; loads the next words during a product."""
    DTYPE: gl.constexpr = pipeline.mem.x.dtype
    PRODUCT: gl.constexpr = gl.int32 if DTYPE.is_int8() else gl.float32
    LAYOUT: gl.constexpr = total.type.layout
    words, scale = _weights_at(gemm, pipeline, state, LAYOUT, CONSUMER)
    for k_step in range(work_tile.k_begin, work_tile.k_end):
        a = expand(words, DTYPE, gl.DotOperandLayout(0, LAYOUT, 4))
        product = gl.zeros(total.shape, PRODUCT, LAYOUT)
        x = pipeline.mem.x.index(state.stage).permute((1, 0))
        product = warpgroup_mma(a, x, product, is_async=True, use_acc=False)
        next_state, ahead = _ahead(state, k_step == work_tile.k_end - 1)
        next_words, next_scale = _weights_at(gemm, pipeline, ahead, LAYOUT, CONSUMER)
        product = warpgroup_mma_wait(0, deps=[product])
        pipeline.consumer_release(state)
        total = _add(product, scale, total, gemm.NUMERICS.in_groups)
        words, scale = next_words, next_scale
        state = next_state
    return total, state
