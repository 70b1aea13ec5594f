"""Causal attention of prompt chunks over paged keys and values for Hopper's tensor core, in Gluon.

Knows no scheduler. A block stays on its SM and takes tiles of 128 query rows from a counter. Two
warpgroups do 64 rows each: while one raises powers of two, the tensor core multiplies for the
other. One warp more asks the copy engine for pages, another one loads queries; both run ahead. Over
8-bit pages four warps more unpack codes.

A row is one token of one query head; the rows of all heads that share a KV head follow each other.
Steps of a tile go from its last key to its first, so those that need the causal mask come first.

Legend: T tokens of a step, R requests, H query heads, J KV heads, D head dim, P pages, B tokens of
a page, X pages of a block table; S parts of a context.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from qkernels.attention.config import PREFILL_ROWS, prefill_split
from qkernels.attention.merge_splits import merge_parts, whole
from qkernels.attention.sm90_prefill_dequant import CODE_SLOTS, PIECE, VECTORS, unpack_pages
from qkernels.attention.sm90_prefill_load import (
    COLUMNS,
    HALF,
    KEYS,
    SLOTS,
    STAGES,
    WORDS,
    load_pages,
    load_queries,
)
from qkernels.attention.sm90_prefill_mma import SHRINK, attend
from qkernels.attention.triton_paged import LOG2_E
from qkernels.gpu.config import ceil_div, power_of_two
from qkernels.gpu.device import sm_count
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pipeline import new_barriers
from qkernels.gpu.tma import describe
from qkernels.gpu.workspace import workspace
from qkernels.operands.limbs import LimbForm, Limbs

# Of a thread at launch: 12 warps, over 8-bit pages 16, which then share them out anew.
REGISTERS, CODED_REGISTERS = 168, 128


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
    k_scales_PBJ: torch.Tensor | None = None,
    v_scales_PBJ: torch.Tensor | None = None,
    limbs: LimbForm | None = None,
    inputs_ready: bool = False,  # nothing is read ahead
    split: int | None = None,
) -> torch.Tensor | Limbs:
    """As ops.paged_attention, where dispatch.py takes it; `split` overrides prefill_split.

    Uses a counter of the device's workspace, so calls on one device must follow each other.
    """
    T, H, D = q_THD.shape
    R = context_lengths_R.shape[0]
    P, B, J, _ = k_pages_PBJD.shape
    out_THD = torch.empty((T, H, D), dtype=q_THD.dtype, device=q_THD.device)
    if T == 0 or R == 0:
        return whole(out_THD, limbs)
    if P == 0:
        return whole(out_THD.zero_(), limbs)
    if q_THD.data_ptr() % 16 or q_THD.stride(2) != 1 or any(s % 8 for s in q_THD.stride()[:2]):
        q_THD = q_THD.clone(memory_format=torch.contiguous_format)  # rows are copied by 16 bytes
    group = H // J
    sms = sm_count(q_THD.device)
    if split is None:
        visible = min(max_context_len, window or max_context_len)
        split = prefill_split(max(R, ceil_div(T * group, PREFILL_ROWS)) * J, visible, sms)
    partials = sums = None
    if split > 1:
        partials = out_THD.new_empty((T, H, split, D), dtype=torch.float32)
        sums = out_THD.new_empty((2, T, H, split), dtype=torch.float32)
    padded_d = max(COLUMNS.value, power_of_two(D))
    coded = k_scales_PBJ is not None
    scale_strides = (0,) * 6
    if coded:
        scale_strides = (*k_scales_PBJ.stride(), *v_scales_PBJ.stride())
    uniform = not any((*scale_strides[:2], *scale_strides[3:5]))
    # Request r owns the tiles from query_starts[r] * group // PREFILL_ROWS + r on, at least as many
    # as its rows need, so their number follows from T and R alone.
    tickets = (T * group // PREFILL_ROWS + R) * J * split
    with on_device(q_THD):
        launch(
            _chunk_attention,
            (min(tickets, sms),),
            q_THD,
            _boxes(k_pages_PBJD, padded_d),
            _boxes(v_pages_PBJD, padded_d),
            k_scales_PBJ,
            v_scales_PBJ,
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
            *scale_strides,
            H=H,
            J=J,
            D=D,
            PADDED_D=padded_d,
            B=B,
            WINDOWED=window is not None,
            SOFT_CAP=soft_cap is not None,
            SPLIT=split,
            IS_INT=k_pages_PBJD.dtype == torch.int8,
            UNIFORM=coded and uniform,
            num_warps=4,
            maxnreg=CODED_REGISTERS if coded else REGISTERS,
        )
    if split == 1:
        return whole(out_THD, limbs)
    return merge_parts(partials, sums, query_starts_R1, out_THD, limbs)


def _boxes(pages_PBJD: torch.Tensor, padded_d: int) -> TensorDescriptor:
    """What the copy engine needs: boxes of a page, a head and 128 bytes, or fewer of codes."""
    if pages_PBJD.element_size() == 1:
        pages_PBJD = pages_PBJD.view(torch.int8)
    size, rows = pages_PBJD.element_size(), pages_PBJD.shape[1]
    rows = rows if size == 2 else min(PIECE.value, rows)
    return describe(_descriptor, pages_PBJD, (1, rows, 1, min(padded_d, 128 // size)))


def _descriptor(base, shape, strides, block) -> TensorDescriptor:
    size = base.dtype.itemsize
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=block[-1] * size, element_bitwidth=8 * size, rank=4
    )
    return TensorDescriptor(base, shape, strides, block, layout)


@gluon.jit(do_not_specialize=["R", "T", "tickets", "window", "stride_table"])
def _chunk_attention(
    q_ptr,  # [T, H, D]
    k_desc,  # [P, B, J, D], in boxes of one page, one head and up to 128 bytes
    v_desc,
    k_scales_ptr,  # [P, B, J] of 8-bit pages, else None
    v_scales_ptr,
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
    SPLIT: gl.constexpr,
    IS_INT: gl.constexpr,  # 8-bit pages: int8, not float8
    UNIFORM: gl.constexpr,  # 8-bit pages: one scale for all keys of a head, one for all values
):
    GROUP: gl.constexpr = H // J
    CODED: gl.constexpr = k_scales_ptr is not None
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    operand: gl.constexpr = gl.float16 if CODED else dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k_memory = gl.allocate_shared_memory(operand, [STAGES, KEYS, PADDED_D], layout)
    v_memory = gl.allocate_shared_memory(operand, [STAGES, KEYS, PADDED_D], layout)
    q_memory = gl.allocate_shared_memory(dtype, [SLOTS * 2, HALF, PADDED_D], layout)
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tile_memory = gl.allocate_shared_memory(gl.int32, [SLOTS * WORDS, 1], words)
    k_full, k_empty = new_barriers(STAGES, READERS=2)
    v_full, v_empty = new_barriers(STAGES, READERS=2)
    q_full, q_empty = new_barriers(SLOTS, READERS=2)
    tile_full, tile_empty = new_barriers(SLOTS, READERS=4 if CODED else 3)
    k_ring = (k_memory, k_full, k_empty)
    v_ring = (v_memory, v_full, v_empty)
    q_ring = (q_memory, q_full, q_empty)
    tile_ring = (tile_memory, tile_full, tile_empty)
    batch = (starts_ptr, lengths_ptr, counter_ptr, R)
    out = (out_ptr, partials_ptr, sums_ptr)
    if CODED and dtype != gl.float16:
        scale /= SHRINK
    numbers = (scale, cap_log2, window)
    # tuples without a name, since a named one would hold no compile-time values
    # fmt: off
    if CODED:
        vectors = gl.allocate_shared_memory(gl.float32, [STAGES * VECTORS, KEYS], words)
        codes_layout: gl.constexpr = gl.NVMMASharedLayout(
            swizzle_byte_width=PADDED_D, element_bitwidth=8, rank=2
        )
        codes_memory = gl.allocate_shared_memory(
            gl.int8, [CODE_SLOTS, PIECE, PADDED_D], codes_layout
        )
        codes_full, codes_empty = new_barriers(CODE_SLOTS, READERS=1)
        codes_ring = (codes_memory, codes_full, codes_empty)
        fence_async_shared()
        gl.warp_specialize(
            [
                (attend, (
                    0, out, q_ring, k_ring, v_ring, tile_ring, vectors, T, numbers,
                    (k_scales_ptr, v_scales_ptr, stride_ksj, stride_vsj),
                    B, H, GROUP, D, WINDOWED, SOFT_CAP, SPLIT, True, UNIFORM,
                )),
                (attend, (
                    1, out, q_ring, k_ring, v_ring, tile_ring, vectors, T, numbers,
                    (k_scales_ptr, v_scales_ptr, stride_ksj, stride_vsj),
                    B, H, GROUP, D, WINDOWED, SOFT_CAP, SPLIT, True, UNIFORM,
                )),
                (unpack_pages, (
                    k_ring, v_ring, codes_ring, vectors, tile_ring,
                    (k_scales_ptr, v_scales_ptr, stride_ksp, stride_ksb, stride_ksj,
                     stride_vsp, stride_vsb, stride_vsj),
                    tables_ptr, stride_table, scale, window,
                    B, GROUP, WINDOWED, SPLIT, IS_INT, UNIFORM,
                )),
                (load_pages, (
                    k_desc, v_desc, codes_ring, codes_ring, tile_ring, batch, tickets, tables_ptr,
                    stride_table, window, B, J, GROUP, WINDOWED, SPLIT, True,
                )),
                (load_queries, (
                    q_ptr, q_ring, tile_ring, stride_qt, stride_qh, GROUP, D, PADDED_D,
                )),
            ],
            [4, 4, 1, 1],
            [216, 56, 24, 24],
        )
    else:
        fence_async_shared()
        gl.warp_specialize(
            [
                (attend, (
                    0, out, q_ring, k_ring, v_ring, tile_ring, None, T, numbers, None,
                    B, H, GROUP, D, WINDOWED, SOFT_CAP, SPLIT, False, False,
                )),
                (attend, (
                    1, out, q_ring, k_ring, v_ring, tile_ring, None, T, numbers, None,
                    B, H, GROUP, D, WINDOWED, SOFT_CAP, SPLIT, False, False,
                )),
                (load_pages, (
                    k_desc, v_desc, k_ring, v_ring, tile_ring, batch, tickets, tables_ptr,
                    stride_table, window, B, J, GROUP, WINDOWED, SPLIT, False,
                )),
                (load_queries, (
                    q_ptr, q_ring, tile_ring, stride_qt, stride_qh, GROUP, D, PADDED_D,
                )),
            ],
            [4, 1, 1],
            # the warps that only load leave their registers to the others
            [240, 24, 24],
        )
