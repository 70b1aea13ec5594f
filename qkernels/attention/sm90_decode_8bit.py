"""Attention of few query rows over 8-bit and 4-bit KV, for sm_90, in Gluon.

triton_paged.py launches it for bfloat16 queries. cp.async loads codes into a multistage pipeline
without barriers: each warp loads and reads its own keys of a step and has its own softmax state.
The block merges its warps at the end. Codes of keys are converted to float16 and codes of values to
bfloat16, exactly; their scales multiply scores and weights. The layouts of mma operands follow the
order in memory (sm90_decode_8bit_load.py). 4-bit codes are loaded like 8-bit codes of half as many
channels and have their own operand conversion (int4/sm90_operands.py).

Legend: W warps, M padded rows (8), N keys of a warp's step, D head dim.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from qkernels.attention.cache import PagedKv
from qkernels.attention.config import AttentionConfig
from qkernels.attention.int4.sm90_operands import (
    HIGH_KEY_OFFSET,
    LOW_KEY_OFFSET,
    VALUE_OFFSET,
    channel_of_input_4bit,
    channel_of_output_4bit,
    half_pair,
    key_operands_4bit,
    value_operand_4bit,
)
from qkernels.attention.sm90_decode_8bit_load import (
    KEYS_OF_WARP,
    KvHead,
    Stages,
    layouts,
    load_pages,
    load_step,
)
from qkernels.attention.sm90_decode_8bit_operands import (
    channel_of_input,
    channel_of_output,
    key_operand,
    value_operand,
)
from qkernels.gpu.launch import launch
from qkernels.gpu.pdl import pdl_options
from qkernels.gpu.pdl_gluon import griddepcontrol_wait, launch_dependents
from qkernels.gpu.pipeline import next_stage

# float16 has a smaller range than bfloat16: queries are multiplied by this power of two, scores by
# its inverse
QUERY_SHRINK = 2.0**-6


def attend(
    grid: tuple[int, int, int],
    q_THD: torch.Tensor,
    cache: PagedKv,
    shared: tuple,
    table_stride: int,
    constants: dict[str, int | bool],
    config: AttentionConfig,
    inputs_ready: bool,
    rows: int,
) -> None:
    """Launch the kernel; `shared` and `constants` are those of triton_paged._paged_attention.

    `rows`: number of query rows that are computed, at most.
    """
    k_words = cache.k_pages.view(torch.int32)
    v_bytes = cache.v_pages.view(torch.int8)
    k_scales, v_scales = cache.k_scales, cache.v_scales
    if cache.is_4bit:  # view the scales and zeros of a slot and head as one integer
        k_scales, v_scales = k_scales.view(torch.int64), v_scales.view(torch.int32)
    blocks, heads, splits = grid
    tables, starts, lengths, bounds, _, _, *others = shared
    launch(
        _decode_attention_8bit,
        (heads, blocks, splits),
        q_THD,
        k_words,
        v_bytes,
        tables,
        starts,
        lengths,
        bounds,
        k_scales,
        v_scales,
        *others,
        *(k_words.stride(dim) for dim in (0, 2)),
        *(v_bytes.stride(dim) for dim in (0, 2)),
        *k_scales.stride()[:3],
        *v_scales.stride()[:3],
        table_stride,
        **constants,
        IS_INT=cache.k_pages.dtype == torch.int8,
        INT4=cache.is_4bit,
        SHRINK=QUERY_SHRINK,
        W=config.warps,
        N=KEYS_OF_WARP,
        STAGES=config.stages,
        STRIDE_KB=k_words.stride(1),
        STRIDE_VB=v_bytes.stride(1),
        **layouts(v_bytes.shape[3], config.warps),
        INPUTS_READY=inputs_ready,
        num_warps=config.warps,
        **pdl_options(q_THD, rows),
    )


@gluon.jit
def _weight_operand(weight, OPERAND_B: gl.constexpr):
    """Convert weights [W, N, 8 rows] from the accumulator's layout to operand B."""
    W: gl.constexpr = weight.shape[0]
    N: gl.constexpr = weight.shape[1]
    weight = _transposed(weight.to(gl.bfloat16))
    weight = weight.reshape([W, N // 8, 8, 8]).permute([0, 1, 3, 2]).reshape([W, N, 8])
    return gl.convert_layout(weight, OPERAND_B)


@gluon.jit
def _merge_warps(largest, weights, values):
    """Merge the warps' softmax states: largest score [M], weights [M], sums of values [D, M]."""
    all_largest = gl.max(largest, 0)
    base = gl.where(all_largest == float("-inf"), 0.0, all_largest)
    shrink = gl.exp2(largest - base[None, :])
    all_weights = gl.sum(gl.sum(weights, 1) * shrink, 0)
    return all_largest, all_weights, gl.sum(values * shrink[:, None, :], 0)


@gluon.jit
def _transposed(weight):
    """Transpose each tile of 8 keys and 8 rows in [..., 8 keys, 8 rows]; the shape stays."""
    return gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
        "=r,r",
        [weight],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def request_of(starts_ptr, block, R, BLOCK_Q: gl.constexpr):
    """Return the same as request_of in gpu/row_blocks.py, which Gluon cannot call."""
    PROBES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    probe = gl.arange(0, 32, layout=PROBES)
    first = 0
    count = R
    while count > 1:
        apart = (count + 31) // 32
        request = first + probe * apart
        inside = probe * apart < count
        start = gl.load(starts_ptr + request, mask=inside, other=0)
        owned = inside & (start // BLOCK_Q + request <= block)
        first += (gl.sum(owned.to(gl.int32), 0) - 1) * apart
        count = gl.minimum(apart, R - first)
    return first


@gluon.jit
def rows_of(starts_ptr, block, R, blocks_each, BLOCK_Q: gl.constexpr):
    """Return the same as rows_of in gpu/row_blocks.py, which Gluon cannot call."""
    index = 0
    if blocks_each > 0:
        request = block // blocks_each
        index = block % blocks_each
    else:
        request = request_of(starts_ptr, block, R, BLOCK_Q)
    start = gl.load(starts_ptr + request)
    count = gl.load(starts_ptr + request + 1) - start
    if blocks_each == 0:
        index = block - start // BLOCK_Q - request
    return request, start, count, index * BLOCK_Q


@gluon.jit(do_not_specialize=["R", "T", "blocks_each"])
def _decode_attention_8bit(
    q_ptr,  # [T, H, D]
    k_ptr,  # [P, B, J, D / 4] words of codes; D / 8 with 4-bit codes
    v_ptr,  # [P, B, J, D] bytes; D / 2 with 4-bit codes
    tables_ptr,  # [R, X]
    starts_ptr,  # [R + 1]
    lengths_ptr,  # [R]
    bounds_ptr,  # [2], as AttentionStep.bounds_2
    k_scales_ptr,  # [P, B, J]; with 4-bit codes int64: scale, zero, scale, zero
    v_scales_ptr,  # [P, B, J]; with 4-bit codes int32: scale, zero
    out_ptr,  # [T, H, D], written if SPLIT is 1
    partials_ptr,  # as in _paged_attention
    sums_ptr,
    R,
    T,
    blocks_each,  # as row_grid returns it
    scale,
    cap_log2,
    stride_qt,
    stride_qh,
    stride_kp,  # in words
    stride_kj,
    stride_vp,
    stride_vj,
    stride_ksp,
    stride_ksb,
    stride_ksj,
    stride_vsp,
    stride_vsb,
    stride_vsj,
    stride_table,
    H: gl.constexpr,
    GROUP: gl.constexpr,
    PADDED_GROUP: gl.constexpr,
    D: gl.constexpr,
    B: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    IS_INT: gl.constexpr,
    INT4: gl.constexpr,
    SPLIT: gl.constexpr,
    SHRINK: gl.constexpr,
    W: gl.constexpr,
    N: gl.constexpr,
    STAGES: gl.constexpr,
    STRIDE_KB: gl.constexpr,
    STRIDE_VB: gl.constexpr,
    KEYS: gl.constexpr,  # layouts()
    VALUES: gl.constexpr,
    SLOTS: gl.constexpr,
    PRODUCT: gl.constexpr,
    INPUTS_READY: gl.constexpr,  # inputs may be read before the previous kernel ends
    PDL: gl.constexpr,
):
    M: gl.constexpr = 8
    BYTES_OF_ROW: gl.constexpr = D // 2 if INT4 else D
    CHUNK: gl.constexpr = BYTES_OF_ROW // 8 if BYTES_OF_ROW < 128 else 16
    BLOCK_Q: gl.constexpr = M // PADDED_GROUP
    # the heads of a request run at the same time, because their rows are adjacent in memory
    kv_head, block, split = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    if PDL:
        launch_dependents()
    if PDL and not INPUTS_READY:
        griddepcontrol_wait()
    request, start, count, first_row = rows_of(starts_ptr, block, R, blocks_each, BLOCK_Q)
    before = gl.load(lengths_ptr + request) - count
    is_outside = (request < gl.load(bounds_ptr)) | (request >= gl.load(bounds_ptr + 1))
    end = before + gl.minimum(first_row + BLOCK_Q, count)
    begin = 0
    if WINDOW > 0:
        begin = gl.maximum(0, before + first_row - WINDOW + 1)
    first_step = begin // (W * N)
    last_step = (end + W * N - 1) // (W * N)
    if SPLIT > 1:
        steps = (last_step - first_step + SPLIT - 1) // SPLIT
        first_step += split * steps
        last_step = gl.minimum(last_step, first_step + steps)

    head = KvHead(
        table=tables_ptr + request.to(gl.int64) * stride_table,
        k_ptr=k_ptr + kv_head * stride_kj,
        v_ptr=v_ptr + kv_head * stride_vj,
        k_scales_ptr=k_scales_ptr + kv_head * stride_ksj,
        v_scales_ptr=v_scales_ptr + kv_head * stride_vsj,
        begin=begin,
        end=gl.minimum(end, last_step * (W * N)),
        stride_kp=stride_kp,
        stride_vp=stride_vp,
        stride_ksp=stride_ksp,
        stride_ksb=stride_ksb,
        stride_vsp=stride_vsp,
        stride_vsb=stride_vsb,
        STRIDE_KB=STRIDE_KB,
        STRIDE_VB=STRIDE_VB,
        B=B,
        W=W,
        N=N,
        KEYS=KEYS,
        VALUES=VALUES,
        SLOTS=SLOTS,
    )
    STEP: gl.constexpr = W * N
    pages = load_pages(head, first_step * STEP)
    if PDL and INPUTS_READY:
        griddepcontrol_wait()
    if (first_row >= count) | is_outside:
        return

    # queries, in the order of the keys' bytes
    OPERAND_A: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    OPERAND_B: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 2)
    m = gl.arange(0, M, layout=gl.SliceLayout(0, gl.SliceLayout(0, OPERAND_B)))
    i = gl.arange(0, BYTES_OF_ROW, layout=gl.SliceLayout(1, gl.SliceLayout(0, OPERAND_B)))
    i = channel_of_input_4bit(i, BYTES_OF_ROW) if INT4 else channel_of_input(i)
    w = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, OPERAND_B)))
    q_row = first_row + m // PADDED_GROUP
    q_rows = (start + q_row).to(gl.int64) * stride_qt
    q_rows += (kv_head * GROUP + m % PADDED_GROUP) * stride_qh
    q_real = (q_row < count) & (m % PADDED_GROUP < GROUP)
    every = w[:, None][:, :, None] * 0 + i[:, None][None, :, :]
    q_ptrs = q_ptr + q_rows[None, :][None, :, :] + every
    ROWS: gl.constexpr = gl.SliceLayout(2, PRODUCT)
    HEADS: gl.constexpr = gl.SliceLayout(1, PRODUCT)
    q = gl.load(q_ptrs, mask=q_real[None, :][None, :, :] & (every >= 0), other=0.0)
    q = (q.to(gl.float32) * SHRINK).to(gl.float16)
    if INT4:
        high = gl.load(
            q_ptrs + BYTES_OF_ROW, mask=q_real[None, :][None, :, :] & (every >= 0), other=0.0
        )
        q_high = (high.to(gl.float32) * (SHRINK / 16)).to(gl.float16)
        # sums of the rounded queries, so that the offset in the codes cancels exactly
        sum_low = gl.convert_layout(gl.sum(q.to(gl.float32), 1), HEADS)[:, None, :]
        sum_high = 16 * gl.convert_layout(gl.sum(q_high.to(gl.float32), 1), HEADS)[:, None, :]
        zeros = gl.full([W, N, M], 0.0, gl.float32, layout=PRODUCT)  # weights times values' zeros
        # sums of the rounded weights: their product with the codes' offset is subtracted
        ones = gl.full([W, 16, N], 1.0, gl.bfloat16, layout=OPERAND_A)
        sums = gl.full([W, 16, M], 0.0, gl.float32, layout=PRODUCT)
    row_w = gl.arange(0, W, layout=gl.SliceLayout(1, ROWS))
    row_n = gl.arange(0, N, layout=gl.SliceLayout(0, ROWS))
    keys = row_w[:, None] * N + row_n[None, :]
    row_m = gl.arange(0, M, layout=gl.SliceLayout(0, gl.SliceLayout(0, PRODUCT)))
    position = (before + first_row + row_m // PADDED_GROUP)[None, :][None, :, :]

    largest = gl.full([W, M], float("-inf"), gl.float32, layout=HEADS)
    weights = gl.full([W, N, M], 0.0, gl.float32, layout=PRODUCT)
    values = gl.full([W, D, M], 0.0, gl.float32, layout=PRODUCT)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    # chunks of 16 bytes are swizzled, so that lanes that read different rows read different banks
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(
        4, 128 // BYTES_OF_ROW, BYTES_OF_ROW // 16, [3, 2, 1, 0]
    )
    BYTES: gl.constexpr = gl.SwizzledSharedLayout(CHUNK, 128 // BYTES_OF_ROW, 8, [3, 2, 1, 0])
    words_shape: gl.constexpr = [STAGES, W, N // 16, 16, BYTES_OF_ROW // 4]
    bytes_shape: gl.constexpr = [STAGES, W, N // 16, 8, BYTES_OF_ROW]
    stages = Stages(
        k=gl.allocate_shared_memory(gl.int32, words_shape, WORDS),
        even_v=gl.allocate_shared_memory(gl.int8, bytes_shape, BYTES),
        odd_v=gl.allocate_shared_memory(gl.int8, bytes_shape, BYTES),
        k_scales=gl.allocate_shared_memory(k_scales_ptr.dtype.element_ty, [STAGES, W, N], FLAT),
        v_scales=gl.allocate_shared_memory(v_scales_ptr.dtype.element_ty, [STAGES, W, N], FLAT),
    )
    for stage in gl.static_range(STAGES - 1):
        first_key = (first_step + stage) * STEP
        load_step(stages, stage, head, pages, first_key)
        # pages are looked up one step ahead: otherwise the loads would wait for the look-up
        pages = load_pages(head, first_key + STEP)
    stage = 0
    for step in range(first_step, last_step):
        first_key = step * STEP
        async_copy.wait_group(STAGES - 2)
        k_codes = stages.k.index(stage).load(KEYS)
        even = stages.even_v.index(stage).load(VALUES)
        odd = stages.odd_v.index(stage).load(VALUES)
        if INT4:
            k_pairs = stages.k_scales.index(stage).load(ROWS)
            scale_low, zero_low = half_pair(k_pairs.to(gl.int32))
            scale_high, zero_high = half_pair((k_pairs >> 32).to(gl.int32))
            v_scale, v_zero = half_pair(stages.v_scales.index(stage).load(ROWS))
        else:
            k_scale = stages.k_scales.index(stage).load(ROWS) * (scale / SHRINK)
            v_scale = stages.v_scales.index(stage).load(ROWS)
        free = gl.where(stage == 0, STAGES - 1, stage - 1)
        next_key = first_key + (STAGES - 1) * STEP
        load_step(stages, free, head, pages, next_key)
        pages = load_pages(head, next_key + STEP)
        stage = next_stage(stage, STAGES)

        nothing = gl.full([W, N, M], 0.0, gl.float32, layout=PRODUCT)
        if INT4:
            k_low, k_high = key_operands_4bit(k_codes, OPERAND_A)
            score_low = mma_v2(k_low, q, nothing - LOW_KEY_OFFSET * sum_low)
            score_high = mma_v2(k_high, q_high, nothing - HIGH_KEY_OFFSET * sum_high)
            score = zero_low[:, :, None] * sum_low + zero_high[:, :, None] * sum_high
            score += scale_low[:, :, None] * score_low
            score += scale_high[:, :, None] * score_high
            score *= scale / SHRINK
        else:
            k = key_operand(k_codes, IS_INT, OPERAND_A)
            score = mma_v2(k, q, nothing)
            score *= k_scale[:, :, None]
        if SOFT_CAP:
            score = cap_log2 - 2 * cap_log2 / (1 + gl.exp2(score * 2.8853900817779268))
        key = (first_key + keys)[:, :, None]
        visible = key <= position
        if WINDOW > 0:
            visible &= key > position - WINDOW
        score = gl.where(visible, score, float("-inf"))
        new_largest = gl.maximum(largest, gl.max(score, 1))
        base = gl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight = gl.exp2(score - base[:, None, :])
        shrink = gl.exp2(largest - base)[:, None, :]
        weights = weights * shrink + weight
        largest = new_largest

        if INT4:
            zeros = zeros * shrink + weight * v_zero[:, :, None]
            v = value_operand_4bit(even, odd, OPERAND_A)
        else:
            v = value_operand(even, odd, IS_INT, CHUNK, OPERAND_A)
        weight = _weight_operand(weight * v_scale[:, :, None], OPERAND_B)
        values = mma_v2(v, weight, values * shrink)
        if INT4:
            sums = mma_v2(ones, weight, sums * shrink)

    async_copy.wait_group(0)
    if INT4:
        values += (gl.sum(zeros, 1) - VALUE_OFFSET / 16 * gl.sum(sums, 1))[:, None, :]
    all_largest, all_weights, out = _merge_warps(largest, weights, values)
    OUT: gl.constexpr = gl.SliceLayout(0, PRODUCT)
    all_weights = gl.convert_layout(all_weights, gl.SliceLayout(0, OUT))
    all_largest = gl.convert_layout(all_largest, gl.SliceLayout(0, OUT))
    m = gl.arange(0, M, layout=gl.SliceLayout(0, OUT))
    n = gl.arange(0, D, layout=gl.SliceLayout(1, OUT))
    d = channel_of_output_4bit(n, BYTES_OF_ROW) if INT4 else channel_of_output(n, CHUNK)
    row = first_row + m // PADDED_GROUP
    real = (row < count) & (m % PADDED_GROUP < GROUP)
    out_row = (start + row).to(gl.int64) * H + kv_head * GROUP + m % PADDED_GROUP
    if SPLIT == 1:
        out = out / gl.where(all_weights == 0, 1.0, all_weights)[None, :]
        gl.store(
            out_ptr + out_row[None, :] * D + d[:, None],
            out.to(out_ptr.dtype.element_ty),
            mask=real[None, :] & (d >= 0)[:, None],
        )
    else:
        split_row = out_row * SPLIT + split
        gl.store(
            partials_ptr + split_row[None, :] * D + d[:, None],
            out,
            mask=(real & (all_weights > 0))[None, :] & (d >= 0)[:, None],
        )
        gl.store(sums_ptr + split_row, all_largest, mask=real)
        gl.store(sums_ptr + T.to(gl.int64) * H * SPLIT + split_row, all_weights, mask=real)
