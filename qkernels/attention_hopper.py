"""Causal attention of prompt chunks over paged keys and values for Hopper's tensor core, in Gluon.

Knows no scheduler. A block stays on its SM and takes tiles of 128 query rows from a counter. Two
warpgroups do 64 rows each: while one raises powers of two, the tensor core multiplies for the
other. One warp more asks the copy engine for pages, another one loads queries; both run ahead.

A row is one token of one query head; the rows of all heads that share a KV head follow each other.
Steps of a tile go from its last key to its first, so those that need the causal mask come first.

Legend: T tokens of a step, R requests, H query heads, J KV heads, D head dim, P pages, B tokens of
a page, X pages of a block table; S parts of a context.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from qkernels.attention_hopper_load import (
    COLUMNS,
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
    WORDS,
    load_pages,
    load_queries,
    new_barriers,
    release,
    steps_of,
    wait_full,
    wait_tile,
    word_of_tile,
)
from qkernels.attention_tiles import CHUNK_ROWS, chunk_split
from qkernels.gluon_names import reshaped
from qkernels.launch import on_device, sm_count, workspace
from qkernels.paged_attention import LOG2_E, _merge_parts
from qkernels.tiles import ceil_div, power_of_two

REGISTERS = 168  # of a thread at launch: 12 warps, which then share them out anew


def paged_attention(
    q_THD: torch.Tensor,
    k_pages_PBJD: torch.Tensor,
    v_pages_PBJD: torch.Tensor,
    block_tables_RX: torch.Tensor,
    query_starts_R1: torch.Tensor,
    context_lengths_R: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    max_query_len: int,
    max_context_len: int,
    soft_cap: float | None = None,
    k_scales_PBJ: None = None,
    v_scales_PBJ: None = None,
    split: int | None = None,
) -> torch.Tensor:
    """As ops.paged_attention, where dispatch.py takes it; `split` overrides chunk_split.

    Uses a counter of the device's workspace, so calls on one device must follow each other.
    """
    T, H, D = q_THD.shape
    R = context_lengths_R.shape[0]
    P, B, J, _ = k_pages_PBJD.shape
    out_THD = torch.empty((T, H, D), dtype=q_THD.dtype, device=q_THD.device)
    if T == 0 or R == 0:
        return out_THD
    if P == 0:
        return out_THD.zero_()
    if q_THD.data_ptr() % 16 or q_THD.stride(2) != 1 or any(s % 8 for s in q_THD.stride()[:2]):
        q_THD = q_THD.clone(memory_format=torch.contiguous_format)  # rows are copied by 16 bytes
    group = H // J
    sms = sm_count(q_THD.device)
    if split is None:
        visible = min(max_context_len, window or max_context_len)
        split = chunk_split(max(R, ceil_div(T * group, CHUNK_ROWS)) * J, visible, sms)
    partials = sums = None
    if split > 1:
        partials = out_THD.new_empty((T, H, split, D), dtype=torch.float32)
        sums = out_THD.new_empty((2, T, H, split), dtype=torch.float32)
    box = [1, B, 1, COLUMNS.value]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    # Request r owns the tiles from query_starts[r] * group // CHUNK_ROWS + r on, at least as many
    # as its rows need, so their number follows from T and R alone.
    tickets = (T * group // CHUNK_ROWS + R) * J * split
    with on_device(q_THD):
        _chunk_attention[(min(tickets, sms),)](
            q_THD,
            TensorDescriptor.from_tensor(k_pages_PBJD, box, layout),
            TensorDescriptor.from_tensor(v_pages_PBJD, box, layout),
            block_tables_RX,
            query_starts_R1,
            context_lengths_R,
            out_THD,
            partials,
            sums,
            workspace(q_THD.device)[1],
            R,
            T,
            tickets,
            scale / soft_cap if soft_cap else scale * LOG2_E,
            soft_cap * LOG2_E if soft_cap else 0.0,
            window or 0,
            q_THD.stride(0),
            q_THD.stride(1),
            block_tables_RX.stride(0),
            H=H,
            J=J,
            D=D,
            PADDED_D=max(COLUMNS.value, power_of_two(D)),
            WINDOWED=window is not None,
            SOFT_CAP=soft_cap is not None,
            SPLIT=split,
            num_warps=4,
            maxnreg=REGISTERS,
        )
        if split > 1:
            _merge_parts[(T, H)](
                partials,
                sums,
                query_starts_R1,
                out_THD,
                R,
                T,
                H=H,
                D=D,
                PADDED_D=power_of_two(D),
                SPLIT=split,
                num_warps=ceil_div(power_of_two(D) * split, 1024),
            )
    return out_THD


@gluon.jit
def _zero_tail(v_ring, n, length, B: gl.constexpr):
    """Zero the values after the context's last key: zero weights times NaN would be NaN.

    Both warpgroups do it, so that neither waits for the other; they write the same.
    """
    chunks: gl.constexpr = v_ring[0].shape[2] // COLUMNS
    lanes: gl.constexpr = COLUMNS // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
    memory: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    boxes = reshaped(v_ring[0], [STAGES * chunks * (KEYS // B), B, COLUMNS], memory)
    for c in gl.static_range(chunks):
        box = boxes.index((n % STAGES * chunks + c) * (KEYS // B) + length % KEYS // B)
        exists = gl.arange(0, B, gl.SliceLayout(1, layout)) < length % B
        box.store(gl.where(exists[:, None], box.load(layout), 0.0))
    fence_async_shared()


@gluon.jit
def _softmax(
    score,
    last,
    largest,
    weights,
    numbers,
    MASKED: gl.constexpr,
    WINDOWED: gl.constexpr,
    SOFT_CAP: gl.constexpr,
):
    """One step's scores to (largest score, sum of weights, weights, shrinking of sums so far).

    last: the last key of the step that a row sees, counted from its first.
    """
    scale, cap_log2, window = numbers
    if SOFT_CAP:  # cap * tanh(score), where exp2 may be 0 or infinite; 2 log2(e)
        score = cap_log2 - 2 * cap_log2 / (1 + gl.exp2(score * (scale * 2.8853900817779268)))
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
    return new_largest, weights * shrink + gl.sum(weight, 1), weight, shrink


@gluon.jit
def _steps(
    first,
    last,
    tile,
    state,
    values,
    numbers,
    MASKED: gl.constexpr,
    WINDOWED: gl.constexpr,
    SOFT_CAP: gl.constexpr,
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
        wait_full(k_ring, now, STAGES)
        score = warpgroup_mma(q, k, score, use_acc=False, is_async=True)
        # while that runs: the weights of the step before in 16 bits, the sums shrunk to them
        rounded = gl.convert_layout(weight.to(q.dtype), weight_layout)
        values = values * gl.convert_layout(shrink, gl.SliceLayout(1, value_layout))[:, None]
        wait_full(v_ring, now - 1, STAGES)
        values = warpgroup_mma(rounded, v, values, is_async=True)
        score = warpgroup_mma_wait(1, [score])
        last_key = position - (last_step - i) * KEYS
        largest, weights, weight, shrink = _softmax(
            score, last_key, largest, weights, numbers, MASKED, WINDOWED, SOFT_CAP
        )
        values, rounded = warpgroup_mma_wait(0, [values, rounded])
        release(k_ring, now, STAGES)
        release(v_ring, now - 1, STAGES)
    return (largest, weights, weight, shrink), values


@gluon.jit
def _attend(
    half,
    out,
    q_ring,
    k_ring,
    v_ring,
    tile_ring,
    T,
    numbers,
    B: gl.constexpr,
    H: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    WINDOWED: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """One warpgroup: half of the rows of each tile. `out`: (out, partials, sums)."""
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
        k = k_ring[0].index(n % STAGES).permute([1, 0])
        score = gl.zeros([HALF, KEYS], gl.float32, score_layout)
        largest = gl.full([HALF], float("-inf"), gl.float32, gl.SliceLayout(1, score_layout))
        weights = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, score_layout))
        values = gl.zeros([HALF, PADDED_D], gl.float32, value_layout)
        wait_full(q_ring, tiles, SLOTS)
        wait_full(k_ring, n, STAGES)
        score = warpgroup_mma(q, k, score, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(0, [score])
        release(k_ring, n, STAGES)
        last_key = position - (last - 1) * KEYS
        state = _softmax(score, last_key, largest, weights, numbers, True, WINDOWED, SOFT_CAP)
        if (length < last * KEYS) & (length > (last - 1) * KEYS) & (length % B > 0):
            wait_full(v_ring, n, STAGES)
            _zero_tail(v_ring, n, length, B)
        tile = (q, k_ring, v_ring, n, last - 1, position)
        state, values = _steps(1, masked, tile, state, values, numbers, True, WINDOWED, SOFT_CAP)
        state, values = _steps(
            masked, whole, tile, state, values, numbers, False, WINDOWED, SOFT_CAP
        )
        if WINDOWED:
            state, values = _steps(
                whole, steps, tile, state, values, numbers, True, WINDOWED, SOFT_CAP
            )
        largest, weights, weight, shrink = state
        n += steps
        rounded = gl.convert_layout(weight.to(q.dtype), weight_layout)
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
        if SPLIT == 1:
            inverse = 1.0 / gl.where(weights == 0, 1.0, weights)
            # through the queries' memory, so that whole rows are written at once
            q.store((values * inverse[:, None]).to(q.dtype))
            rows_of_out = q.load(row_layout)
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


@gluon.jit(do_not_specialize=["R", "T", "tickets", "window", "stride_table"])
def _chunk_attention(
    q_ptr,  # [T, H, D]
    k_desc,  # [P, B, J, D], in boxes of one page, one head and 64 columns
    v_desc,
    tables_ptr,  # [R, X]
    starts_ptr,  # [R + 1]
    lengths_ptr,  # [R]
    out_ptr,  # [T, H, D], when SPLIT is 1
    partials_ptr,  # [T, H, S, D], otherwise: each part's weighted sum of values
    sums_ptr,  # [2, T, H, S]: each part's largest score, and its sum of weights
    counter_ptr,  # tickets taken: 0 before and after
    R,
    T,
    tickets,
    scale,  # scores in powers of two, since exp2 is the hardware's; SOFT_CAP: in parts of the cap
    cap_log2,
    window,  # keys that a row sees, where WINDOWED
    stride_qt,
    stride_qh,
    stride_table,
    H: gl.constexpr,
    J: gl.constexpr,
    D: gl.constexpr,
    PADDED_D: gl.constexpr,
    WINDOWED: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    SPLIT: gl.constexpr,
):
    GROUP: gl.constexpr = H // J
    B: gl.constexpr = k_desc.block_shape[1]
    dtype: gl.constexpr = k_desc.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k_memory = gl.allocate_shared_memory(dtype, [STAGES, KEYS, PADDED_D], layout)
    v_memory = gl.allocate_shared_memory(dtype, [STAGES, KEYS, PADDED_D], layout)
    q_memory = gl.allocate_shared_memory(dtype, [SLOTS * 2, HALF, PADDED_D], layout)
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tile_memory = gl.allocate_shared_memory(gl.int32, [SLOTS * WORDS, 1], words)
    k_full, k_empty = new_barriers(STAGES, READERS=2)
    v_full, v_empty = new_barriers(STAGES, READERS=2)
    q_full, q_empty = new_barriers(SLOTS, READERS=2)
    tile_full, tile_empty = new_barriers(SLOTS, READERS=3)
    k_ring = (k_memory, k_full, k_empty)
    v_ring = (v_memory, v_full, v_empty)
    q_ring = (q_memory, q_full, q_empty)
    tile_ring = (tile_memory, tile_full, tile_empty)
    batch = (starts_ptr, lengths_ptr, counter_ptr, R)
    out = (out_ptr, partials_ptr, sums_ptr)
    numbers = (scale, cap_log2, window)
    fence_async_shared()
    # tuples without a name, since a named one would hold no compile-time values
    # fmt: off
    gl.warp_specialize(
        [
            (_attend, (
                0, out, q_ring, k_ring, v_ring, tile_ring, T, numbers,
                B, H, GROUP, D, WINDOWED, SOFT_CAP, SPLIT,
            )),
            (_attend, (
                1, out, q_ring, k_ring, v_ring, tile_ring, T, numbers,
                B, H, GROUP, D, WINDOWED, SOFT_CAP, SPLIT,
            )),
            (load_pages, (
                k_desc, v_desc, k_ring, v_ring, tile_ring, batch, tickets, tables_ptr,
                stride_table, window, J, GROUP, WINDOWED, SPLIT,
            )),
            (load_queries, (
                q_ptr, q_ring, tile_ring, stride_qt, stride_qh, GROUP, D, PADDED_D,
            )),
        ],
        [4, 1, 1],
        # the warps that only load leave their registers to the others
        [240, 24, 24],
    )
    # fmt: on
