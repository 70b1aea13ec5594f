"""Gluon functions that sum the products of a work tile for one consumer warpgroup of w4a8/sm90.py.

They differ in what runs while the tensor core multiplies. All give the same bits: the sum of a
group is exact (integers) or the tensor core's own (float8), and groups are added in order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from qkernels.gpu.pipeline import PipelineState
from qkernels.gpu.registers import join_columns, split_columns
from qkernels.w4a8.sm90_codes import expand, load_words, split_k


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
def multiply_ahead(gemm, pipeline, turns, state, total, work_tile, CONSUMER: gl.constexpr):
    """Same as multiply_groups for one group per K step; loads the next words during a product.

    Also return `turns`.
    """
    DTYPE: gl.constexpr = pipeline.mem.x.dtype
    PRODUCT: gl.constexpr = gl.int32 if DTYPE.is_int8() else gl.float32
    LAYOUT: gl.constexpr = total.type.layout
    words, scale = _weights_at(gemm, pipeline, state, LAYOUT, CONSUMER)
    for k_step in range(work_tile.k_begin, work_tile.k_end):
        a = expand(words, DTYPE, gl.DotOperandLayout(0, LAYOUT, 4))
        product = gl.zeros(total.shape, PRODUCT, LAYOUT)
        x = pipeline.mem.x.index(state.stage).permute((1, 0))
        is_first = k_step == work_tile.k_begin
        turns.wait(CONSUMER, is_first)
        product = warpgroup_mma(a, x, product, is_async=True, use_acc=False)
        next_state, ahead = _ahead(state, k_step == work_tile.k_end - 1)
        next_words, next_scale = _weights_at(gemm, pipeline, ahead, LAYOUT, CONSUMER)
        product = warpgroup_mma_wait(0, deps=[product])
        turns.pass_on(CONSUMER, is_first)
        pipeline.consumer_release(state)
        total = _add(product, scale, total, gemm.NUMERICS.in_groups)
        words, scale = next_words, next_scale
        state, turns = next_state, turns.after("every")
    return total, turns.after("first"), state


@gluon.jit
def multiply_in_parts(gemm, pipeline, turns, state, total, work_tile, CONSUMER: gl.constexpr):
    """Same as multiply_ahead, in products of CONFIG.product_columns rows of x. Also return `turns`.

    Each part is added to its total while the tensor core multiplies the next one: the last part of
    a step during the first product of the next step. Products alternate between two sets of
    registers. ptxas would use a third set, and spill, if it could issue a product before the last
    one in these registers is added. Therefore waits pin the sums, and a product formally adds the
    last one in its registers if an opaque condition, `never`, is true. The additions that no
    product waits for run if `always` is true: ptxas would move them between the instructions of a
    product, or after the wait for all products.
    """
    CONFIG: gl.constexpr = gemm.CONFIG
    IN_GROUPS: gl.constexpr = gemm.NUMERICS.in_groups
    DTYPE: gl.constexpr = pipeline.mem.x.dtype
    PRODUCT: gl.constexpr = gl.int32 if DTYPE.is_int8() else gl.float32
    WIDTH: gl.constexpr = CONFIG.product_columns
    PARTS: gl.constexpr = CONFIG.block_b // WIDTH
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    A: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 4)
    always, never = gemm.M > 0, gemm.M < 0
    totals = ()
    for part in gl.static_range(PARTS):
        of_part = split_columns(total, PARTS)[part]
        totals += (gl.convert_layout(of_part, LAYOUT, assert_trivial=True),)
    words, scale = _weights_at(gemm, pipeline, state, LAYOUT, CONSUMER)
    nothing = gl.zeros([64, WIDTH], PRODUCT, LAYOUT)
    last, last_scale = nothing, scale
    for k_step in range(work_tile.k_begin, work_tile.k_end):
        a = expand(words, DTYPE, A)
        x = pipeline.mem.x.index(state.stage)
        is_first = k_step == work_tile.k_begin
        turns.wait(CONSUMER, is_first)
        columns = x.slice(0, WIDTH).permute((1, 0))
        product = warpgroup_mma(a, columns, nothing, is_async=True, use_acc=False)
        last, product = warpgroup_mma_wait(1, deps=[last, product])
        last_total = totals[PARTS - 1]
        if always:
            last_total = _add(last, last_scale, last_total, IN_GROUPS)
        last_total, product = warpgroup_mma_wait(1, deps=[last_total, product])
        # not right after the last product, where no product would run meanwhile
        pipeline.consumer_release_previous(state, k_step > work_tile.k_begin)
        free, added = last, ()
        for part in gl.static_range(1, PARTS):
            columns = x.slice(part * WIDTH, WIDTH).permute((1, 0))
            following = warpgroup_mma(a, columns, free, is_async=True, use_acc=never)
            product, following = warpgroup_mma_wait(1, deps=[product, following])
            if part == PARTS - 1:
                # the last part runs while the next consumer begins
                turns.pass_on(CONSUMER, is_first)
            adds = True if part < PARTS - 1 else always
            sums = totals[part - 1]
            if adds:
                sums = _add(product, scale, sums, IN_GROUPS)
            sums, following = warpgroup_mma_wait(1, deps=[sums, following])
            added += (sums,)
            free, product = product, following
        next_state, ahead = _ahead(state, k_step == work_tile.k_end - 1)
        next_words, next_scale = _weights_at(gemm, pipeline, ahead, LAYOUT, CONSUMER)
        last = warpgroup_mma_wait(0, deps=[product])
        totals = added + (last_total,)
        last_scale = scale
        words, scale = next_words, next_scale
        state, turns = next_state, turns.after("every")
    pipeline.consumer_release_previous(state)
    added = ()
    for part in gl.static_range(PARTS - 1):
        added += (totals[part],)
    added += (_add(last, last_scale, totals[PARTS - 1], IN_GROUPS),)
    total = gl.convert_layout(join_columns(added), total.type.layout, assert_trivial=True)
    return total, turns.after("first"), state
