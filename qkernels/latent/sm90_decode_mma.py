"""The warps of sm90_decode.py that multiply, in Gluon: scores and weights, then sums of values.

Both products have keys or channels as their 64 rows and queries as their columns, so that 16 heads
do not have to be padded to 64:

    scores [KEYS, N] = entries q^T        values [L, N] += latents^T weights
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from qkernels.gpu.gluon_compat import barrier, load_elements, reshaped
from qkernels.latent.sm90_decode_structs import KEYS, STAGES, WIDTH


@gluon.jit
def _load_queries(latents, shared, tile):
    """Load the queries of the tile's columns into shared memory; others become zeros."""
    L: gl.constexpr = latents.L
    E: gl.constexpr = latents.E
    N: gl.constexpr = latents.N
    CHUNKS: gl.constexpr = L // WIDTH
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    memory: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    chunks = reshaped(shared.q_latent, [CHUNKS, N, WIDTH], memory)
    index, real = tile.out_row(latents, gl.arange(0, N, gl.SliceLayout(1, layout)))
    d = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    ptrs = latents.q_ptr + gl.multiple_of(index * E, 8)[:, None] + d[None, :]
    for c in gl.static_range(CHUNKS):
        every = real[:, None] & (d < WIDTH)[None, :]
        load_elements(chunks.index(c), ptrs + c * WIDTH, mask=every)
    of_rope = real[:, None] & (d < E - L)[None, :]
    load_elements(shared.q_rope.index(0), ptrs + L, mask=of_rope)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()


@gluon.jit
def _zero_tail(latents, entries, stage, keys):
    """Zero the latents from number `keys` of a stage on: a weight of 0 times NaN would be NaN."""
    CHUNKS: gl.constexpr = latents.L // WIDTH
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    memory: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    chunks = reshaped(entries.latent, [STAGES * CHUNKS, KEYS, WIDTH], memory)
    exists = gl.arange(0, KEYS, gl.SliceLayout(1, layout)) < keys
    for c in gl.static_range(CHUNKS):
        chunk = chunks.index(stage * CHUNKS + c)
        chunk.store(gl.where(exists[:, None], chunk.load(layout), 0.0))


@gluon.jit
def _masked(latents, tile, scores, first_key):
    """Return the scores of a step with -inf for keys that a column does not see."""
    SCORES: gl.constexpr = scores.type.layout
    key = first_key + gl.arange(0, KEYS, gl.SliceLayout(1, SCORES))
    row = tile.row(latents, gl.arange(0, latents.N, gl.SliceLayout(0, SCORES)))
    last_key = gl.minimum(tile.before + row, tile.end - 1)
    return gl.where(key[:, None] <= last_key[None, :], scores, float("-inf"))


@gluon.jit
def _sum_in_lanes(weight):
    """Return [4, 8, N], in which each lane has added its two keys of a column."""
    return gl.sum(weight.reshape([4, 2, 8, weight.shape[1]]), 1)


@gluon.jit
def _add_in_lanes(total, shrink, weight):
    """Return total times `shrink` [N], plus the weights of a step."""
    shrink = gl.convert_layout(shrink, gl.SliceLayout(0, gl.SliceLayout(0, total.type.layout)))
    return total * shrink[None, :][None, :, :] + _sum_in_lanes(weight)


@gluon.jit
def score(latents, shared, tile):
    """Run the warpgroup that computes the scores and weights of each step.

    Every step passes the weights, and the factor by which earlier sums shrink, to sum_values. After
    the last step the sums of weights follow.
    """
    N: gl.constexpr = latents.N
    SPLIT: gl.constexpr = latents.SPLIT
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    _load_queries(latents, shared, tile)
    n = gl.arange(0, N, COLUMNS)
    largest = gl.full([N], float("-inf"), gl.float32, COLUMNS)
    nothing = gl.zeros([KEYS, N], gl.float32, SCORES)
    total = _sum_in_lanes(nothing)
    for step in range(tile.first_step, tile.last_step):
        number = step - tile.first_step
        stage = shared.entries.consumer_at(number)
        shared.entries.consumer_wait(stage)
        latent = shared.entries.mem.latent.index(stage.stage)
        rope = shared.entries.mem.rope.index(stage.stage)
        # An opaque zero: it keeps the compiler from hoisting the descriptors of 36 products out of
        # the loop, where they would take registers or spill.
        zero = step >> 30
        q_latent = shared.q_latent.index(zero).permute([1, 0])
        q_rope = shared.q_rope.index(zero).permute([1, 0])
        scores = warpgroup_mma(latent, q_latent, nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma(rope, q_rope, scores, is_async=True)
        scores = warpgroup_mma_wait(0, [scores])
        if (step + 1) * KEYS > tile.before + tile.first_row + 1:
            scores = _masked(latents, tile, scores, step * KEYS)
        new_largest = gl.maximum(largest, gl.max(scores, 0) * latents.scale)
        # a column that has seen no key yet: -inf - -inf would be NaN
        base = gl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight = gl.exp2(scores * latents.scale - base[None, :])
        shrink = gl.exp2(largest - base)
        total = _add_in_lanes(total, shrink, weight)
        largest = new_largest
        if (step + 1) * KEYS > tile.end:
            _zero_tail(latents, shared.entries.mem, stage.stage, tile.end - step * KEYS)
        passed = shared.weights.producer_at(number)
        shared.weights.producer_acquire(passed)
        shared.weights.mem.weight.permute([1, 0]).store(weight.to(latents.q_ptr.dtype.element_ty))
        shared.weights.mem.factor.store(shrink)
        fence_async_shared()
        shared.weights.producer_commit(passed)
    sums = gl.convert_layout(gl.sum(gl.sum(total, 1), 0), COLUMNS)
    passed = shared.weights.producer_at(tile.last_step - tile.first_step)
    shared.weights.producer_acquire(passed)
    shared.weights.mem.factor.store(sums)
    shared.weights.producer_commit(passed)
    if SPLIT > 1:
        # An opaque zero: otherwise addresses are computed before the loop, and spill.
        index, real = tile.out_row(latents, n + (sums < 0).to(gl.int32))
        split_row = index * SPLIT + tile.split
        totals_ptr = latents.sums_ptr + latents.T.to(gl.int64) * latents.H * SPLIT
        gl.store(latents.sums_ptr + split_row, largest, mask=real)
        gl.store(totals_ptr + split_row, sums, mask=real)


@gluon.jit
def sum_values(latents, shared, tile):
    """Run the warps that sum the values of all steps, and store the result."""
    L: gl.constexpr = latents.L
    N: gl.constexpr = latents.N
    SPLIT: gl.constexpr = latents.SPLIT
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, N, 16])
    COLUMNS: gl.constexpr = gl.SliceLayout(0, VALUES)
    values = gl.zeros([L, N], gl.float32, VALUES)
    weight = shared.weights.mem.weight.permute([1, 0])
    for step in range(tile.first_step, tile.last_step):
        number = step - tile.first_step
        stage = shared.entries.consumer_at(number)
        passed = shared.weights.consumer_at(number)
        shared.weights.consumer_wait(passed)
        # the entries are complete before the weights: this wait makes them visible to these warps
        shared.entries.consumer_wait(stage)
        values *= shared.weights.mem.factor.load(COLUMNS)[None, :]
        latent = shared.entries.mem.latent.index(stage.stage).permute([1, 0])
        values = warpgroup_mma(latent, weight, values, is_async=True)
        values = warpgroup_mma_wait(0, [values])
        shared.weights.consumer_release(passed)
        shared.entries.consumer_release(stage)
    shared.weights.consumer_wait(shared.weights.consumer_at(tile.last_step - tile.first_step))
    total = shared.weights.mem.factor.load(COLUMNS)
    if SPLIT == 1:
        inverse = 1.0 / gl.where(total == 0, 1.0, total)
        # the result goes through the queries' shared memory, so that whole rows are written
        rows = shared.q_latent.index(0)
        rows.permute([1, 0]).store((values * inverse[None, :]).to(rows.dtype))
        barrier()
        LANES: gl.constexpr = 32 if L >= 256 else L // 8
        ROWS: gl.constexpr = gl.BlockedLayout(
            [1, 8], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0]
        )
        index, real = tile.out_row(latents, gl.arange(0, N, gl.SliceLayout(1, ROWS)))
        d = gl.arange(0, L, gl.SliceLayout(0, ROWS))
        ptrs = latents.out_ptr + (index * L)[:, None] + d[None, :]
        gl.store(ptrs, rows.load(ROWS), mask=real[:, None] & (d < L)[None, :])
    else:
        index, real = tile.out_row(latents, gl.arange(0, N, COLUMNS))
        d = gl.arange(0, L, gl.SliceLayout(1, VALUES))
        split_row = index * SPLIT + tile.split
        ptrs = latents.partials_ptr + (split_row * L)[None, :] + d[:, None]
        gl.store(ptrs, values, mask=(real & (total > 0))[None, :] & (d < L)[:, None])
