"""Causal attention of prompt chunks over paged keys and values, for sm_90, in Gluon.

A persistent, warp-specialized kernel: each block takes tiles of 128 query rows from a counter. Two
consumer warpgroups have 64 rows each: while one computes its softmax, the tensor core multiplies
for the other. One producer warp loads pages by TMA, another one loads queries; both run ahead of
the consumers. With 8-bit KV, four more warps dequantize the pages.

A row is one token of one query head; the rows of all heads that share a KV head are adjacent. A
tile's steps go from its last key to its first, so the steps that need the causal mask come first.

Legend: see qkernels/ops.py; S splits of a context.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from qkernels.attention.cache import AttentionStep, PagedKv
from qkernels.attention.config import PREFILL_ROWS, prefill_split
from qkernels.attention.merge_splits import merge_splits
from qkernels.attention.sm90_prefill_dequant import NUM_VECTORS, dequantize_pages
from qkernels.attention.sm90_prefill_load import load_pages, load_queries
from qkernels.attention.sm90_prefill_mma import SHRINK, attend
from qkernels.attention.sm90_prefill_structs import (
    CODE_ROWS,
    CODE_STAGES,
    COLUMNS,
    CONSUMER_ROWS,
    KEYS,
    ROWS,
    STAGES,
    TILE_STAGES,
    TILE_WORDS,
    WIDE_KEYS,
    Attention,
    SharedMemory,
)
from qkernels.attention.triton_paged import LOG2_E
from qkernels.gpu.config import ceil_div, power_of_two
from qkernels.gpu.device import sm_count
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pipeline import make_pipeline
from qkernels.gpu.tma import describe
from qkernels.gpu.workspace import workspace
from qkernels.operands.limbs import LimbForm, Limbs

# Registers per thread at launch (12 warps; 16 with 8-bit KV). The warps redistribute them.
REGISTERS, REGISTERS_8BIT = 168, 128


def paged_attention(
    q_THD: torch.Tensor,
    cache: PagedKv,
    step: AttentionStep,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None = None,
    limbs: LimbForm | None = None,
    inputs_ready: bool = False,  # not used: the kernel is launched without PDL
    sinks_H: torch.Tensor | None = None,
    out_THD: torch.Tensor | None = None,
    split: int | None = None,
    by_segment: bool = False,
) -> torch.Tensor | Limbs:
    """Implement ops.paged_attention for prompt chunks (attention/rows.py).

    `out_THD` is contiguous and written instead of a new tensor. `split` overrides prefill_split.
    `by_segment` sums the values of every 128 keys separately, as fixed_order/sm90_segments.py
    defines. The tile counter is in the stream's workspace (gpu/workspace.py).
    """
    T, H, D = q_THD.shape
    R = step.context_lengths_R.shape[0]
    P, B, J, _ = cache.k_pages.shape
    if out_THD is None:
        out_THD = torch.empty((T, H, D), dtype=q_THD.dtype, device=q_THD.device)
    if T == 0 or R == 0:
        return out_THD
    if P == 0:
        return out_THD.zero_()
    if q_THD.data_ptr() % 16 or q_THD.stride(2) != 1 or any(s % 8 for s in q_THD.stride()[:2]):
        q_THD = q_THD.clone(memory_format=torch.contiguous_format)  # 16-byte loads need alignment
    group = H // J
    sms = sm_count(q_THD.device)
    if step.bounds_2 is not None:  # merge_splits would write all rows
        split = 1
    if split is None:
        visible = min(step.max_context_len, window or step.max_context_len)
        split = prefill_split(max(R, ceil_div(T * group, PREFILL_ROWS)) * J, visible, sms)
    partials = sums = None
    if split > 1:
        partials = out_THD.new_empty((T, H, split, D), dtype=torch.float32)
        sums = out_THD.new_empty((2, T, H, split), dtype=torch.float32)
    padded_d = max(COLUMNS.value, power_of_two(D))
    # strides by page and slot of both scales
    uniform = not any((*cache.scale_strides[:2], *cache.scale_strides[3:5]))
    # Request r owns the tiles from query_starts[r] * group // PREFILL_ROWS + r on, at least as many
    # as its rows need, so their number follows from T and R alone.
    num_work_tiles = (T * group // PREFILL_ROWS + R) * J * split
    with on_device(q_THD):
        launch(
            _prefill_attention,
            (min(num_work_tiles, sms),),
            q_THD,
            boxes(cache.k_pages, padded_d),
            boxes(cache.v_pages, padded_d),
            cache.k_scales,
            cache.v_scales,
            step.block_tables_RX,
            step.query_starts_R1,
            step.context_lengths_R,
            step.bounds_on(q_THD.device),
            out_THD,
            partials,
            sums,
            sinks_H,
            workspace(q_THD.device)[1],
            R,
            T,
            num_work_tiles,
            scale / soft_cap if soft_cap else scale * LOG2_E,
            soft_cap * LOG2_E if soft_cap else 0.0,
            window or 0,
            q_THD.stride(0),
            q_THD.stride(1),
            step.block_tables_RX.stride(0),
            *cache.scale_strides,
            H=H,
            J=J,
            D=D,
            PADDED_D=padded_d,
            B=B,
            WINDOWED=window is not None,
            SOFT_CAP=soft_cap is not None,
            NUM_SPLITS=split,
            IS_INT=cache.k_pages.dtype == torch.int8,
            UNIFORM=cache.is_8bit and uniform,
            BY_SEGMENT=by_segment,
            num_warps=4,
            maxnreg=REGISTERS_8BIT if cache.is_8bit else REGISTERS,
        )
    if split == 1:
        return out_THD
    return merge_splits(partials, sums, step.query_starts_R1, out_THD, limbs)


def boxes(pages_PBJD: torch.Tensor, padded_d: int) -> TensorDescriptor:
    """Return a TMA descriptor with boxes of one page, one head and 128 bytes.

    For 8-bit pages, a box has at most 64 keys.
    """
    if pages_PBJD.element_size() == 1:
        pages_PBJD = pages_PBJD.view(torch.int8)
    size, rows = pages_PBJD.element_size(), pages_PBJD.shape[1]
    rows = rows if size == 2 else min(CODE_ROWS.value, rows)
    return describe(_descriptor, pages_PBJD, (1, rows, 1, min(padded_d, 128 // size)))


def _descriptor(base, shape, strides, block) -> TensorDescriptor:
    size = base.dtype.itemsize
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=block[-1] * size, element_bitwidth=8 * size, rank=4
    )
    return TensorDescriptor(base, shape, strides, block, layout)


@gluon.jit(do_not_specialize=["R", "T", "num_work_tiles", "window", "stride_table"])
def _prefill_attention(
    q_ptr,  # as in sm90_prefill_structs.Attention
    k_desc,
    v_desc,
    k_scales_ptr,
    v_scales_ptr,
    tables_ptr,
    starts_ptr,
    lengths_ptr,
    bounds_ptr,  # [2], as AttentionStep.bounds_2, whose second number is above all requests
    out_ptr,
    partials_ptr,
    sums_ptr,
    sinks_ptr,
    counter_ptr,
    R,
    T,
    num_work_tiles,
    scale,
    cap_log2,
    window,
    stride_qt,
    stride_qh,
    stride_table,
    stride_ksp,
    stride_ksb,
    stride_ksj,
    stride_vsp,
    stride_vsb,
    stride_vsj,
    H: gl.constexpr,
    J: gl.constexpr,
    D: gl.constexpr,
    PADDED_D: gl.constexpr,
    B: gl.constexpr,
    WINDOWED: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    NUM_SPLITS: gl.constexpr,
    IS_INT: gl.constexpr,
    UNIFORM: gl.constexpr,
    BY_SEGMENT: gl.constexpr,
):
    KV_8BIT: gl.constexpr = k_scales_ptr is not None
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    operand: gl.constexpr = gl.float16 if KV_8BIT else dtype
    keys: gl.constexpr = KEYS if PADDED_D <= 128 else WIDE_KEYS
    query_stages: gl.constexpr = TILE_STAGES if PADDED_D <= 128 else 1
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_memory = gl.allocate_shared_memory(operand, [STAGES, keys, PADDED_D], layout)
    v_memory = gl.allocate_shared_memory(operand, [STAGES, keys, PADDED_D], layout)
    q_memory = gl.allocate_shared_memory(dtype, [query_stages * 2, CONSUMER_ROWS, PADDED_D], layout)
    tile_memory = gl.allocate_shared_memory(gl.int32, [TILE_STAGES * TILE_WORDS, 1], flat)
    k = make_pipeline(k_memory, STAGES, 2)
    v = make_pipeline(v_memory, STAGES, 2)
    q = make_pipeline(q_memory, query_stages, 2)
    tiles = make_pipeline(tile_memory, TILE_STAGES, 4 if KV_8BIT else 3)
    codes = None
    vectors = None
    if KV_8BIT:
        vectors = gl.allocate_shared_memory(gl.float32, [STAGES * NUM_VECTORS, KEYS], flat)
        codes_layout: gl.constexpr = gl.NVMMASharedLayout(
            swizzle_byte_width=PADDED_D, element_bitwidth=8, rank=2
        )
        codes_memory = gl.allocate_shared_memory(
            gl.int8, [CODE_STAGES, CODE_ROWS, PADDED_D], codes_layout
        )
        codes = make_pipeline(codes_memory, CODE_STAGES, 1)
        if dtype != gl.float16:
            scale /= SHRINK
    fence_async_shared()
    # tiles of the requests before the first that is computed: the last ones, as tiles are numbered
    skipped = gl.load(bounds_ptr)
    skipped = gl.load(starts_ptr + skipped) * (H // J) // ROWS + skipped
    attention = Attention(
        q_ptr=q_ptr,
        k_desc=k_desc,
        v_desc=v_desc,
        k_scales_ptr=k_scales_ptr,
        v_scales_ptr=v_scales_ptr,
        tables_ptr=tables_ptr,
        starts_ptr=starts_ptr,
        lengths_ptr=lengths_ptr,
        out_ptr=out_ptr,
        partials_ptr=partials_ptr,
        sums_ptr=sums_ptr,
        sinks_ptr=sinks_ptr,
        counter_ptr=counter_ptr,
        R=R,
        T=T,
        num_work_tiles=num_work_tiles,
        num_computed_tiles=num_work_tiles - skipped * (J * NUM_SPLITS),
        scale=scale,
        cap_log2=cap_log2,
        window=window,
        stride_qt=stride_qt,
        stride_qh=stride_qh,
        stride_table=stride_table,
        stride_ksp=stride_ksp,
        stride_ksb=stride_ksb,
        stride_ksj=stride_ksj,
        stride_vsp=stride_vsp,
        stride_vsb=stride_vsb,
        stride_vsj=stride_vsj,
        H=H,
        J=J,
        GROUP=H // J,
        D=D,
        PADDED_D=PADDED_D,
        KEYS=keys,
        B=B,
        WINDOWED=WINDOWED,
        SOFT_CAP=SOFT_CAP,
        NUM_SPLITS=NUM_SPLITS,
        KV_8BIT=KV_8BIT,
        IS_INT=IS_INT,
        UNIFORM=UNIFORM,
        BY_SEGMENT=BY_SEGMENT,
    )
    shared = SharedMemory(tiles=tiles, q=q, k=k, v=v, codes=codes, vectors=vectors)
    if KV_8BIT:
        gl.warp_specialize(
            [
                (attend, (attention, shared, 0)),
                (attend, (attention, shared, 1)),
                (dequantize_pages, (attention, shared)),
                (load_pages, (attention, shared)),
                (load_queries, (attention, shared)),
            ],
            [4, 4, 1, 1],
            [216, 56, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (attend, (attention, shared, 0)),
                (attend, (attention, shared, 1)),
                (load_pages, (attention, shared)),
                (load_queries, (attention, shared)),
            ],
            [4, 1, 1],
            # the producers give up registers for the consumers
            [240, 24, 24],
        )
