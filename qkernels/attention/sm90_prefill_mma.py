"""The consumer warpgroups of sm90_prefill.py, in Gluon: scores, softmax and sums of values.

With 8-bit KV, keys and values are float16 codes from sm90_prefill_dequant.py. Then queries and
weights are float16, too, and scores are multiplied by the scales here.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from qkernels.attention.fixed_order.sm90_fold import fold_factors, fold_values
from qkernels.attention.sm90_prefill_dequant import (
    INVERSE_VALUE_SCALES,
    KEY_SCALES,
    LOG_VALUE_SCALES,
    key_vector,
)
from qkernels.attention.sm90_prefill_load import zero_tail
from qkernels.attention.sm90_prefill_structs import (
    CONSUMER_ROWS,
    COUNT,
    FIRST_ROW,
    KV_HEAD,
    LENGTH,
    SPLIT,
    START,
    Tile,
    tile_word,
    wait_tile,
)
from qkernels.gpu.gluon_compat import aggregate, barrier, retyped

LOG2_E = gl.constexpr(1.4426950408889634)
# bfloat16 queries are converted to float16, which has a smaller range: they are multiplied by this
# power of two, and scores by its inverse.
SHRINK = gl.constexpr(2.0**-6)


@aggregate
class Softmax:
    """Softmax state of a consumer's rows after a step."""

    largest: gl.tensor  # score so far [CONSUMER_ROWS]
    total: gl.tensor  # sum of weights so far [CONSUMER_ROWS]
    weight: gl.tensor  # weights of this step [CONSUMER_ROWS, KEYS], or packed
    rescale: gl.tensor  # factor for the values summed before this step [CONSUMER_ROWS]


@aggregate
class ConsumerTile:
    """One consumer's half of a tile."""

    q: gl.shared_memory_descriptor  # [CONSUMER_ROWS, PADDED_D]
    first: gl.tensor  # pipeline count of the tile's first step, for keys and values
    last_step: gl.tensor  # computed first: steps go from last to first
    position: gl.tensor  # last key that each row sees [CONSUMER_ROWS]
    scale: gl.tensor  # factor of scores


@gluon.jit
def _softmax(attention, shared, scale, score, last_key, largest, total, n, MASKED: gl.constexpr):
    """Add one step's scores to the softmax state. Return the new state.

    n: number of the step. last_key: last key of the step that each row sees. With the vectors of
    8-bit KV, the weights include the values' scales, and `largest` is their largest logarithm.
    """
    WINDOWED: gl.constexpr = attention.WINDOWED
    SOFT_CAP: gl.constexpr = attention.SOFT_CAP
    HAS_VECTORS: gl.constexpr = attention.KV_8BIT and not attention.UNIFORM
    KEYS: gl.constexpr = attention.KEYS
    layout: gl.constexpr = score.type.layout
    stage = shared.k.consumer_at(n).stage
    if HAS_VECTORS:
        key_scales = key_vector(shared.vectors, stage, KEY_SCALES, layout)[None, :]
        log_value_scales = key_vector(shared.vectors, stage, LOG_VALUE_SCALES, layout)[None, :]
        scale = 1.0
        if SOFT_CAP:
            score = capped(score * key_scales, attention.cap_log2, 1.0) + log_value_scales
        else:
            score = score * key_scales + log_value_scales
    elif SOFT_CAP:
        score = capped(score, attention.cap_log2, scale)
        scale = 1.0
    if MASKED:
        key = gl.arange(0, KEYS, gl.SliceLayout(0, score.type.layout))
        # key <= last_key, rearranged: one side differs between threads, the other is constant
        other_keys = (key & ~6)[None, :]
        last_key = last_key[:, None] - (key & 6)[None, :]
        visible = other_keys <= last_key
        if WINDOWED:
            visible &= other_keys > last_key - attention.window
        score = gl.where(visible, score, float("-inf"))
    new_largest = gl.maximum(largest, gl.max(score, 1) * scale)
    base = new_largest
    if MASKED:  # a row that has seen no key yet: -inf - -inf would be NaN
        base = gl.where(new_largest == float("-inf"), 0.0, new_largest)
    if attention.BY_SEGMENT:
        weight = gl.exp2(gl.fma(score, scale, -base[:, None]))
    else:
        weight = gl.exp2(score * scale - base[:, None])
    rescale = gl.exp2(largest - base)
    counted = weight
    if HAS_VECTORS:
        counted = weight * key_vector(shared.vectors, stage, INVERSE_VALUE_SCALES, layout)[None, :]
    total = total * rescale + gl.sum(counted, 1)
    return Softmax(largest=new_largest, total=total, weight=weight, rescale=rescale)


@gluon.jit
def capped(score, cap_log2, scale):
    """cap * tanh(score * scale), where exp2 may be 0 or infinite."""
    two_log2_e: gl.constexpr = 2.8853900817779268
    return cap_log2 - 2 * cap_log2 / (1 + gl.exp2(score * (scale * two_log2_e)))


@gluon.jit
def _packed(softmax):
    """Pack pairs of weights as float16x2: kept unpacked across steps, each takes a register."""
    low, high = softmax.weight.reshape([CONSUMER_ROWS, softmax.weight.shape[1] // 2, 2]).split()
    weight = gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=False, pack=1
    )
    return Softmax(
        largest=softmax.largest, total=softmax.total, weight=weight, rescale=softmax.rescale
    )


@gluon.jit
def _operand_a(weight, dtype: gl.constexpr, layout: gl.constexpr):
    """Convert weights, packed or not, to operand A of the product with values."""
    if weight.dtype == gl.int32:
        low = weight.to(gl.int16).to(gl.float16, bitcast=True)
        high = (weight >> 16).to(gl.int16).to(gl.float16, bitcast=True)
        weight = gl.join(low, high).reshape([CONSUMER_ROWS, 2 * weight.shape[1]])
    return gl.convert_layout(weight.to(dtype), layout)


@gluon.jit
def _float16_queries(q, layout: gl.constexpr):
    """Convert bfloat16 queries to float16, in place."""
    memory: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    converted = retyped(q, gl.float16, memory)
    converted.store((q.load(layout).to(gl.float32) * SHRINK).to(gl.float16))
    fence_async_shared()
    barrier()  # a product reads the queries that all warps wrote
    return converted


@gluon.jit
def _steps(attention, shared, tile, first, last, values, softmax, MASKED: gl.constexpr):
    """Run steps first..last of a tile.

    The scores of a step are computed while the values of the previous step are summed.
    """
    PADDED_D: gl.constexpr = attention.PADDED_D
    KEYS: gl.constexpr = attention.KEYS
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    value_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PADDED_D, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, value_layout, 2)
    for i in range(first, last):
        now = tile.first + i
        k = shared.k.mem.index(shared.k.consumer_at(now).stage).permute([1, 0])
        v = shared.v.mem.index(shared.v.consumer_at(now - 1).stage)
        score = gl.zeros([CONSUMER_ROWS, KEYS], gl.float32, score_layout)
        rounded = _operand_a(softmax.weight, tile.q.dtype, weight_layout)
        shared.k.consumer_wait(shared.k.consumer_at(now))
        score = warpgroup_mma(tile.q, k, score, use_acc=False, is_async=True)
        # while the product runs: convert the previous step's weights to 16 bits, rescale the sums
        rescale = gl.convert_layout(softmax.rescale, gl.SliceLayout(1, value_layout))
        values = values * rescale[:, None]
        shared.v.consumer_wait(shared.v.consumer_at(now - 1))
        values = warpgroup_mma(rounded, v, values, is_async=True)
        score = warpgroup_mma_wait(1, [score])
        last_key = tile.position - (tile.last_step - i) * KEYS
        largest, total = softmax.largest, softmax.total
        softmax = _softmax(
            attention, shared, tile.scale, score, last_key, largest, total, now, MASKED
        )
        values, rounded = warpgroup_mma_wait(0, [values, rounded])
        if attention.KV_8BIT:
            softmax = _packed(softmax)
        shared.k.consumer_release(shared.k.consumer_at(now))
        shared.v.consumer_release(shared.v.consumer_at(now - 1))
    return values, softmax


@aggregate
class Sums:
    """Sums of a consumer's rows over the steps that are folded in so far."""

    largest: gl.tensor  # largest score [CONSUMER_ROWS]
    total: gl.tensor  # sum of weights [CONSUMER_ROWS]
    values: gl.tensor  # weighted sum of values [CONSUMER_ROWS, PADDED_D]


@gluon.jit
def _segment_values(attention, shared, tile, now, softmax):
    """Return the weighted sum of the values of step number `now` alone."""
    PADDED_D: gl.constexpr = attention.PADDED_D
    value_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PADDED_D, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, value_layout, 2)
    v = shared.v.mem.index(shared.v.consumer_at(now).stage)
    rounded = _operand_a(softmax.weight, tile.q.dtype, weight_layout)
    values = gl.zeros([CONSUMER_ROWS, PADDED_D], gl.float32, value_layout)
    shared.v.consumer_wait(shared.v.consumer_at(now))
    values = warpgroup_mma(rounded, v, values, use_acc=False, is_async=True)
    values, rounded = warpgroup_mma_wait(0, [values, rounded])
    shared.v.consumer_release(shared.v.consumer_at(now))
    return values


@gluon.jit
def _fold(sums, softmax, values):
    """Add the softmax state and weighted values of a single step to `sums`."""
    value_layout: gl.constexpr = values.type.layout
    largest, keep, add = fold_factors(sums.largest, softmax.largest)
    total = gl.fma(sums.total, keep, softmax.total * add)
    keep = gl.convert_layout(keep, gl.SliceLayout(1, value_layout))
    add = gl.convert_layout(add, gl.SliceLayout(1, value_layout))
    values = fold_values(sums.values, keep, values, add)
    return Sums(largest=largest, total=total, values=values)


@gluon.jit
def _steps_by_segment(attention, shared, tile, first, last, sums, softmax, MASKED: gl.constexpr):
    """Run steps first..last of a tile. `softmax` is the state of a single step, folded in next.

    A step's values are summed before the next step's scores are computed: the sums of both do not
    fit into registers. Meanwhile the other consumer computes its softmax.
    """
    KEYS: gl.constexpr = attention.KEYS
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    for i in range(first, last):
        now = tile.first + i
        values = _segment_values(attention, shared, tile, now - 1, softmax)
        k = shared.k.mem.index(shared.k.consumer_at(now).stage).permute([1, 0])
        score = gl.zeros([CONSUMER_ROWS, KEYS], gl.float32, score_layout)
        shared.k.consumer_wait(shared.k.consumer_at(now))
        score = warpgroup_mma(tile.q, k, score, use_acc=False, is_async=True)
        sums = _fold(sums, softmax, values)
        score = warpgroup_mma_wait(0, [score])
        last_key = tile.position - (tile.last_step - i) * KEYS
        nothing = gl.full([CONSUMER_ROWS], float("-inf"), gl.float32, row_layout)
        zero = gl.zeros([CONSUMER_ROWS], gl.float32, row_layout)
        softmax = _softmax(
            attention, shared, tile.scale, score, last_key, nothing, zero, now, MASKED
        )
        if attention.KV_8BIT:
            softmax = _packed(softmax)
        shared.k.consumer_release(shared.k.consumer_at(now))
    return sums, softmax


@gluon.jit
def attend(attention, shared, CONSUMER: gl.constexpr):
    """Run a consumer warpgroup, which computes half of the rows of each tile."""
    B: gl.constexpr = attention.B
    H: gl.constexpr = attention.H
    D: gl.constexpr = attention.D
    GROUP: gl.constexpr = attention.GROUP
    PADDED_D: gl.constexpr = attention.PADDED_D
    KEYS: gl.constexpr = attention.KEYS
    NUM_SPLITS: gl.constexpr = attention.NUM_SPLITS
    tiles = shared.tiles
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    value_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PADDED_D, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, value_layout, 2)
    lanes: gl.constexpr = PADDED_D // 8
    row_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
    num_tiles = 0
    n = 0
    while wait_tile(tiles, num_tiles):
        count = tile_word(tiles, num_tiles, COUNT)
        length = tile_word(tiles, num_tiles, LENGTH)
        first_row = tile_word(tiles, num_tiles, FIRST_ROW)
        split = tile_word(tiles, num_tiles, SPLIT)
        steps = Tile(
            start=0, count=count, length=length, first_row=first_row, kv_head=0, split=split
        ).steps(attention)
        scale = attention.scale
        if attention.UNIFORM:
            kv_head = tile_word(tiles, num_tiles, KV_HEAD)
            scale = scale * gl.load(attention.k_scales_ptr + kv_head * attention.stride_ksj)
        first_row += CONSUMER * CONSUMER_ROWS
        before = length - count
        rows = gl.arange(0, CONSUMER_ROWS, gl.SliceLayout(1, score_layout))
        position = before + (first_row + rows) // GROUP
        # Steps that need a mask: steps with keys after the first row's position, but at least one;
        # with a window also steps with keys before the last row's window.
        num_steps = steps.last - steps.first
        masked = steps.last - gl.minimum((before + first_row // GROUP + 1) // KEYS, steps.last)
        masked = gl.minimum(gl.maximum(masked, 1), num_steps)
        whole = num_steps
        if attention.WINDOWED:
            last_row = gl.minimum((first_row + CONSUMER_ROWS - 1) // GROUP, count - 1)
            left = gl.maximum(before + last_row - attention.window + 1, 0)
            whole = gl.maximum(steps.last - (left + KEYS - 1) // KEYS, masked)
            whole = gl.minimum(whole, num_steps)

        q = shared.q.mem.index(shared.q.consumer_at(num_tiles).stage * 2 + CONSUMER)
        shared.q.consumer_wait(shared.q.consumer_at(num_tiles))
        if q.dtype != shared.k.mem.dtype:
            q = _float16_queries(q, row_layout)
        k = shared.k.mem.index(shared.k.consumer_at(n).stage).permute([1, 0])
        score = gl.zeros([CONSUMER_ROWS, KEYS], gl.float32, score_layout)
        row_of_scores: gl.constexpr = gl.SliceLayout(1, score_layout)
        largest = gl.full([CONSUMER_ROWS], float("-inf"), gl.float32, row_of_scores)
        total = gl.zeros([CONSUMER_ROWS], gl.float32, row_of_scores)
        no_largest, no_total = largest, total
        if attention.sinks_ptr is not None:
            # a sink is a key whose value is zero; it belongs to the first split
            head = tile_word(tiles, num_tiles, KV_HEAD) * GROUP + (first_row + rows) % GROUP
            sink = gl.load(attention.sinks_ptr + head) * LOG2_E
            largest = gl.where(split == 0, sink, largest)
            total = gl.where(split == 0, 1.0, total)
        values = gl.zeros([CONSUMER_ROWS, PADDED_D], gl.float32, value_layout)
        shared.k.consumer_wait(shared.k.consumer_at(n))
        score = warpgroup_mma(q, k, score, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(0, [score])
        if not attention.KV_8BIT:
            shared.k.consumer_release(shared.k.consumer_at(n))
        last_key = position - (steps.last - 1) * KEYS
        if attention.BY_SEGMENT:
            softmax = _softmax(
                attention, shared, scale, score, last_key, no_largest, no_total, n, True
            )
        else:
            softmax = _softmax(attention, shared, scale, score, last_key, largest, total, n, True)
        if attention.KV_8BIT:
            # released after the softmax, because this stage also holds the scales
            shared.k.consumer_release(shared.k.consumer_at(n))
            softmax = _packed(softmax)
        elif (length < steps.last * KEYS) & (length > (steps.last - 1) * KEYS) & (length % B > 0):
            shared.v.consumer_wait(shared.v.consumer_at(n))
            zero_tail(shared.v, n, length, B)
        tile = ConsumerTile(q=q, first=n, last_step=steps.last - 1, position=position, scale=scale)
        n += num_steps
        if attention.BY_SEGMENT:
            sums = Sums(largest=largest, total=total, values=values)
            sums, softmax = _steps_by_segment(
                attention, shared, tile, 1, masked, sums, softmax, True
            )
            sums, softmax = _steps_by_segment(
                attention, shared, tile, masked, whole, sums, softmax, False
            )
            if attention.WINDOWED:
                sums, softmax = _steps_by_segment(
                    attention, shared, tile, whole, num_steps, sums, softmax, True
                )
            values = _segment_values(attention, shared, tile, n - 1, softmax)
            sums = _fold(sums, softmax, values)
            largest, total, values = sums.largest, sums.total, sums.values
        else:
            values, softmax = _steps(attention, shared, tile, 1, masked, values, softmax, True)
            values, softmax = _steps(attention, shared, tile, masked, whole, values, softmax, False)
            if attention.WINDOWED:
                values, softmax = _steps(
                    attention, shared, tile, whole, num_steps, values, softmax, True
                )
            rounded = _operand_a(softmax.weight, q.dtype, weight_layout)
            rescale = gl.convert_layout(softmax.rescale, gl.SliceLayout(1, value_layout))
            values = values * rescale[:, None]
            shared.v.consumer_wait(shared.v.consumer_at(n - 1))
            v = shared.v.mem.index(shared.v.consumer_at(n - 1).stage)
            values = warpgroup_mma(rounded, v, values, is_async=True)
            values = warpgroup_mma_wait(0, [values])
            shared.v.consumer_release(shared.v.consumer_at(n - 1))
            largest, total = softmax.largest, softmax.total

        # read again rather than kept in registers, of which the steps use all
        start = tile_word(tiles, num_tiles, START)
        end = tile_word(tiles, num_tiles, COUNT) * GROUP
        first_row = tile_word(tiles, num_tiles, FIRST_ROW) + CONSUMER * CONSUMER_ROWS
        kv_head = tile_word(tiles, num_tiles, KV_HEAD)
        split = tile_word(tiles, num_tiles, SPLIT)
        tiles.consumer_release(tiles.consumer_at(num_tiles))
        largest = gl.convert_layout(largest, gl.SliceLayout(1, value_layout))
        total = gl.convert_layout(total, gl.SliceLayout(1, value_layout))
        if attention.UNIFORM:
            values *= gl.load(attention.v_scales_ptr + kv_head * attention.stride_vsj)
        if NUM_SPLITS == 1:
            inverse = 1.0 / gl.where(total == 0, 1.0, total)
            # results go through the queries' shared memory, so that whole rows are written
            out = shared.q.mem.index(shared.q.consumer_at(num_tiles).stage * 2 + CONSUMER)
            out.store((values * inverse[:, None]).to(out.dtype))
            out_rows = out.load(row_layout)
            shared.q.consumer_release(shared.q.consumer_at(num_tiles))
            row = first_row + gl.arange(0, CONSUMER_ROWS, gl.SliceLayout(1, row_layout))
            d = gl.arange(0, PADDED_D, gl.SliceLayout(0, row_layout))
            token = (start + row // GROUP).to(gl.int64)
            offset = (token * H + kv_head * GROUP + row % GROUP) * D
            mask = (row < end)[:, None] & (d < D)[None, :]
            gl.store(attention.out_ptr + offset[:, None] + d[None, :], out_rows, mask=mask)
        else:
            shared.q.consumer_release(shared.q.consumer_at(num_tiles))
            row = first_row + gl.arange(0, CONSUMER_ROWS, gl.SliceLayout(1, value_layout))
            d = gl.arange(0, PADDED_D, gl.SliceLayout(0, value_layout))
            token = (start + row // GROUP).to(gl.int64)
            offset = (token * H + kv_head * GROUP + row % GROUP) * NUM_SPLITS + split
            mask = (row < end)[:, None] & (d < D)[None, :]
            partials_ptrs = attention.partials_ptr + offset[:, None] * D + d[None, :]
            gl.store(partials_ptrs, values, mask=mask)
            gl.store(attention.sums_ptr + offset, largest, mask=row < end)
            totals_ptr = attention.sums_ptr + attention.T.to(gl.int64) * H * NUM_SPLITS
            gl.store(totals_ptr + offset, total, mask=row < end)
        num_tiles += 1
