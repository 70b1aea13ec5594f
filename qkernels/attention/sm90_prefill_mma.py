"""The warpgroups of sm90_prefill.py that multiply: scores, softmax and sums of values.

Over 8-bit pages keys and values come as float16 codes, from attention_hopper_codes.py. Queries and
weights are float16 then too, and scores take their scales here.

Rings and tiles as in attention_hopper_load.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from qkernels.attention.sm90_prefill_dequant import key_vector
from qkernels.attention.sm90_prefill_load import (
    COUNT,
    FIRST_ROW,
    HALF,
    KEYS,
    KV_HEAD,
    LENGTH,
    PART,
    SLOTS,
    STAGES,
    START,
    release,
    steps_of,
    wait_full,
    wait_tile,
    word_of_tile,
    zero_tail,
)
from qkernels.gpu.gluon_compat import barrier, retyped

# bfloat16 queries become float16, which has not their range: they shrink by a power of two, scores
# grow by it.
SHRINK = gl.constexpr(2.0**-6)


@gluon.jit
def _softmax(
    score,
    last,
    largest,
    weights,
    numbers,
    vectors,
    n,
    MASKED: gl.constexpr,
    WINDOWED: gl.constexpr,
    SOFT_CAP: gl.constexpr,
):
    """One step's scores to (largest score, sum of weights, weights, shrinking of sums so far).

    last: the last key of the step that a row sees, counted from its first. vectors: of step n of
    8-bit pages, as unpack_pages leaves them; the largest score is then of weights times scales.
    """
    scale, cap_log2, window = numbers
    layout: gl.constexpr = score.type.layout
    if vectors is not None:
        key_scales = key_vector(vectors, n, 0, layout)[None, :]
        value_logarithms = key_vector(vectors, n, 1, layout)[None, :]
        scale = 1.0
        if SOFT_CAP:
            score = _capped(score * key_scales, cap_log2, 1.0) + value_logarithms
        else:
            score = score * key_scales + value_logarithms
    elif SOFT_CAP:
        score = _capped(score, cap_log2, scale)
        scale = 1.0
    if MASKED:
        key = gl.arange(0, KEYS, gl.SliceLayout(0, score.type.layout))
        # key <= last, with what differs between threads on one side and constants on the other
        other_keys = (key & ~6)[None, :]
        last = last[:, None] - (key & 6)[None, :]
        visible = other_keys <= last
        if WINDOWED:
            visible &= other_keys > last - window
        score = gl.where(visible, score, float("-inf"))
    new_largest = gl.maximum(largest, gl.max(score, 1) * scale)
    base = new_largest
    if MASKED:  # a row that has seen no key yet: -inf - -inf would be NaN
        base = gl.where(new_largest == float("-inf"), 0.0, new_largest)
    weight = gl.exp2(score * scale - base[:, None])
    shrink = gl.exp2(largest - base)
    counted = weight
    if vectors is not None:
        counted = weight * key_vector(vectors, n, 2, layout)[None, :]
    return new_largest, weights * shrink + gl.sum(counted, 1), weight, shrink


@gluon.jit
def _capped(score, cap_log2, scale):
    """cap * tanh(score * scale), where exp2 may be 0 or infinite."""
    return cap_log2 - 2 * cap_log2 / (
        1 + gl.exp2(score * (scale * 2.8853900817779268))
    )  # 2 log2(e)


@gluon.jit
def _packed(weight):
    """Weights as float16, two in a word: from step to step, single ones take a register each."""
    low, high = weight.reshape([HALF, KEYS // 2, 2]).split()
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _operand(weight, dtype: gl.constexpr, layout: gl.constexpr):
    """Weights, packed or not, as the left operand of the product with values."""
    if weight.dtype == gl.int32:
        low = weight.to(gl.int16).to(gl.float16, bitcast=True)
        high = (weight >> 16).to(gl.int16).to(gl.float16, bitcast=True)
        weight = gl.join(low, high).reshape([HALF, KEYS])
    return gl.convert_layout(weight.to(dtype), layout)


@gluon.jit
def _half_queries(q, layout: gl.constexpr):
    """bfloat16 queries as float16, in their place."""
    memory: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    halves = retyped(q, gl.float16, memory)
    halves.store((q.load(layout).to(gl.float32) * SHRINK).to(gl.float16))
    fence_async_shared()
    barrier()  # a product reads what all warps wrote
    return halves


@gluon.jit
def _steps(
    first,
    last,
    tile,
    state,
    values,
    numbers,
    vectors,
    MASKED: gl.constexpr,
    WINDOWED: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    CODED: gl.constexpr,
):
    """Steps first..last of a tile: scores of one, while the values of the one before are summed."""
    q, k_ring, v_ring, n, last_step, position = tile
    largest, weights, weight, shrink = state
    PADDED_D: gl.constexpr = values.shape[1]
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    value_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PADDED_D, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, value_layout, 2)
    for i in range(first, last):
        now = n + i
        k = k_ring[0].index(now % STAGES).permute([1, 0])
        v = v_ring[0].index((now - 1) % STAGES)
        score = gl.zeros([HALF, KEYS], gl.float32, score_layout)
        rounded = _operand(weight, q.dtype, weight_layout)
        wait_full(k_ring, now, STAGES)
        score = warpgroup_mma(q, k, score, use_acc=False, is_async=True)
        # while that runs: the weights of the step before in 16 bits, the sums shrunk to them
        values = values * gl.convert_layout(shrink, gl.SliceLayout(1, value_layout))[:, None]
        wait_full(v_ring, now - 1, STAGES)
        values = warpgroup_mma(rounded, v, values, is_async=True)
        score = warpgroup_mma_wait(1, [score])
        last_key = position - (last_step - i) * KEYS
        largest, weights, weight, shrink = _softmax(
            score,
            last_key,
            largest,
            weights,
            numbers,
            vectors,
            now,
            MASKED,
            WINDOWED,
            SOFT_CAP,
        )
        values, rounded = warpgroup_mma_wait(0, [values, rounded])
        if CODED:
            weight = _packed(weight)
        release(k_ring, now, STAGES)
        release(v_ring, now - 1, STAGES)
    return (largest, weights, weight, shrink), values


@gluon.jit
def attend(
    half,
    out,
    q_ring,
    k_ring,
    v_ring,
    tile_ring,
    vectors,
    T,
    numbers,
    scales,
    B: gl.constexpr,
    H: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    WINDOWED: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    SPLIT: gl.constexpr,
    CODED: gl.constexpr,
    UNIFORM: gl.constexpr,
):
    """One warpgroup: half of the rows of each tile. `out`: (out, partials, sums).

    `scales`: (pointers of keys' and of values' scales; their strides of head), where UNIFORM.
    """
    PADDED_D: gl.constexpr = q_ring[0].shape[2]
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    value_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PADDED_D, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, value_layout, 2)
    lanes: gl.constexpr = PADDED_D // 8
    row_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
    tiles = 0
    n = 0
    while wait_tile(tile_ring, tiles):
        count = word_of_tile(tile_ring, tiles, COUNT)
        length = word_of_tile(tile_ring, tiles, LENGTH)
        first_row = word_of_tile(tile_ring, tiles, FIRST_ROW)
        part = word_of_tile(tile_ring, tiles, PART)
        tile = (0, count, length, first_row, 0, part)
        begin, first, last = steps_of(tile, numbers[2], GROUP, WINDOWED, SPLIT)
        of_tile = numbers
        of_steps = vectors
        if UNIFORM:
            kv_head = word_of_tile(tile_ring, tiles, KV_HEAD)
            k_scale = gl.load(scales[0] + kv_head * scales[2])
            of_tile = (numbers[0] * k_scale, numbers[1], numbers[2])
            of_steps = None
        first_row += half * HALF
        before = length - count
        rows = gl.arange(0, HALF, gl.SliceLayout(1, score_layout))
        position = before + (first_row + rows) // GROUP
        # The steps that need a mask: those with keys after the first row, and the first of all
        # where a part has none; with a window also those with keys that the last row has left.
        steps = last - first
        masked = last - gl.minimum((before + first_row // GROUP + 1) // KEYS, last)
        masked = gl.minimum(gl.maximum(masked, 1), steps)
        whole = steps
        if WINDOWED:
            last_row = gl.minimum((first_row + HALF - 1) // GROUP, count - 1)
            left = gl.maximum(before + last_row - numbers[2] + 1, 0)
            whole = gl.minimum(gl.maximum(last - (left + KEYS - 1) // KEYS, masked), steps)

        q = q_ring[0].index(tiles % SLOTS * 2 + half)
        wait_full(q_ring, tiles, SLOTS)
        if q.dtype != k_ring[0].dtype:
            q = _half_queries(q, row_layout)
        k = k_ring[0].index(n % STAGES).permute([1, 0])
        score = gl.zeros([HALF, KEYS], gl.float32, score_layout)
        largest = gl.full([HALF], float("-inf"), gl.float32, gl.SliceLayout(1, score_layout))
        weights = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, score_layout))
        values = gl.zeros([HALF, PADDED_D], gl.float32, value_layout)
        wait_full(k_ring, n, STAGES)
        score = warpgroup_mma(q, k, score, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(0, [score])
        if not CODED:
            release(k_ring, n, STAGES)
        last_key = position - (last - 1) * KEYS
        state = _softmax(
            score,
            last_key,
            largest,
            weights,
            of_tile,
            of_steps,
            n,
            True,
            WINDOWED,
            SOFT_CAP,
        )
        if CODED:
            release(k_ring, n, STAGES)  # which hands the scales over as well
            state = (state[0], state[1], _packed(state[2]), state[3])
        elif (length < last * KEYS) & (length > (last - 1) * KEYS) & (length % B > 0):
            wait_full(v_ring, n, STAGES)
            zero_tail(v_ring, n, length, B)
        tile = (q, k_ring, v_ring, n, last - 1, position)
        state, values = _steps(
            1, masked, tile, state, values, of_tile, of_steps, True, WINDOWED, SOFT_CAP, CODED
        )
        state, values = _steps(
            masked, whole, tile, state, values, of_tile, of_steps, False, WINDOWED, SOFT_CAP, CODED
        )
        if WINDOWED:
            state, values = _steps(
                whole,
                steps,
                tile,
                state,
                values,
                of_tile,
                of_steps,
                True,
                WINDOWED,
                SOFT_CAP,
                CODED,
            )
        largest, weights, weight, shrink = state
        n += steps
        rounded = _operand(weight, q.dtype, weight_layout)
        values = values * gl.convert_layout(shrink, gl.SliceLayout(1, value_layout))[:, None]
        wait_full(v_ring, n - 1, STAGES)
        values = warpgroup_mma(rounded, v_ring[0].index((n - 1) % STAGES), values, is_async=True)
        values = warpgroup_mma_wait(0, [values])
        release(v_ring, n - 1, STAGES)

        # read again, not kept: the steps take all registers there are
        start = word_of_tile(tile_ring, tiles, START)
        end = word_of_tile(tile_ring, tiles, COUNT) * GROUP
        first_row = word_of_tile(tile_ring, tiles, FIRST_ROW) + half * HALF
        kv_head = word_of_tile(tile_ring, tiles, KV_HEAD)
        part = word_of_tile(tile_ring, tiles, PART)
        release(tile_ring, tiles, SLOTS)
        largest = gl.convert_layout(largest, gl.SliceLayout(1, value_layout))
        weights = gl.convert_layout(weights, gl.SliceLayout(1, value_layout))
        if UNIFORM:
            values *= gl.load(scales[1] + kv_head * scales[3])
        if SPLIT == 1:
            inverse = 1.0 / gl.where(weights == 0, 1.0, weights)
            # through the queries' memory, so that whole rows are written at once
            rows_in = q_ring[0].index(tiles % SLOTS * 2 + half)
            rows_in.store((values * inverse[:, None]).to(rows_in.dtype))
            rows_of_out = rows_in.load(row_layout)
            release(q_ring, tiles, SLOTS)
            row = first_row + gl.arange(0, HALF, gl.SliceLayout(1, row_layout))
            d = gl.arange(0, PADDED_D, gl.SliceLayout(0, row_layout))
            token = (start + row // GROUP).to(gl.int64)
            offset = (token * H + kv_head * GROUP + row % GROUP) * D
            mask = (row < end)[:, None] & (d < D)[None, :]
            gl.store(out[0] + offset[:, None] + d[None, :], rows_of_out, mask=mask)
        else:
            release(q_ring, tiles, SLOTS)
            row = first_row + gl.arange(0, HALF, gl.SliceLayout(1, value_layout))
            d = gl.arange(0, PADDED_D, gl.SliceLayout(0, value_layout))
            token = (start + row // GROUP).to(gl.int64)
            offset = (token * H + kv_head * GROUP + row % GROUP) * SPLIT + part
            mask = (row < end)[:, None] & (d < D)[None, :]
            gl.store(out[1] + offset[:, None] * D + d[None, :], values, mask=mask)
            gl.store(out[2] + offset, largest, mask=row < end)
            gl.store(out[2] + T.to(gl.int64) * H * SPLIT + offset, weights, mask=row < end)
        tiles += 1
