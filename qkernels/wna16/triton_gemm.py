"""W4A16 and W8A16 in Triton, for any GPU and for Triton's interpreter.

The weight is operand A of the tensor core (y^T = W x^T): dequantized codes then stay in registers,
and only x goes through shared memory. Codes are prepacked in the order of the register fragment
(prepack.py), so a thread unpacks its own words (notes/layouts.md). On NVIDIA GPUs USE_PTX enables
two pieces of inline PTX; the results are the same without them.

Legend: M rows of x, K inputs, N outputs, G groups; BM, BN, BK the tile.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from qkernels.gpu.config import ceil_div
from qkernels.gpu.device import has_pdl, uses_ptx
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.split_k_reduce_triton import arrives_last, sum_splits
from qkernels.gpu.tma import aligned, describe
from qkernels.gpu.workspace import workspace
from qkernels.linear.prepared import PreparedWeight
from qkernels.wna16.layout import TILE_N, k_step, padded_n
from qkernels.wna16.prepack import code_offset
from qkernels.wna16.triton_config import TritonGemmConfig
from qkernels.wna16.unpack.fp4 import fp4_dequantized, fp4_weights, prefetch_scales
from qkernels.wna16.unpack.fp4_layout import fp4_words
from qkernels.wna16.unpack.groups import grouped_weights, grouping, prefetch_steps
from qkernels.wna16.unpack.words import MAGIC_WORD, unpack

# Rows per block of _dequantize_weight. A block is one warp, so that a row's 16 bytes are gathered
# without a barrier. All tried sizes take the same time: 80 us for gate_up, 60 MB to 235 MB.
DEQUANTIZE_ROWS = 16


def run(
    x_MK: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None,
    config: TritonGemmConfig,
) -> torch.Tensor:
    """Multiply contiguous x [M, K] to [M, N]."""
    (M, K), N = x_MK.shape, weight.out_features
    y_MN = torch.empty((M, N), dtype=x_MK.dtype, device=x_MK.device)
    partials, counters = workspace(x_MK.device)
    group = weight.spec.group_length(K)
    block_k = k_step(group)
    grid = (padded_n(N) // config.block_n, config.split, ceil_div(M, config.block_m))
    pdl = config.pdl and has_pdl(x_MK.device)
    x = x_MK
    if config.use_tma:
        x = describe(TensorDescriptor, aligned(x_MK), (config.block_m, block_k))
    with on_device(x_MK):
        launch(
            _wna16_gemm,
            grid,
            x,
            weight.tensors["packed"],
            weight.tensors["scales"],
            weight.tensors.get("offsets"),
            weight.tensors.get("blocks"),
            bias,
            y_MN,
            partials,
            counters,
            M,
            N,
            K,
            STEPS_PER_GROUP=group // block_k,
            GROUPING=grouping(weight.spec, weight.dtype),
            FP4=fp4_words(weight.spec, x_MK.dtype),
            MAGIC=MAGIC_WORD[x_MK.dtype],
            OFFSET=code_offset(weight.spec, weight.dtype),
            BITS=weight.spec.bits,
            BM=config.block_m,
            BN=config.block_n,
            BK=block_k,
            EVEN=K % block_k == 0,
            TILE_N=TILE_N,
            SPLIT=config.split,
            STAGES=config.stages,
            USE_TMA=config.use_tma,
            PDL=pdl,
            USE_PTX=uses_ptx(x_MK.device),
            num_warps=config.warps,
            **({"launch_pdl": True} if pdl else {}),
        )
    return y_MN


def dequantize(weight: PreparedWeight) -> torch.Tensor:
    """Return the weight [N, K] in its activation dtype, rounded as by PackedWeight.dequantize."""
    N, K = weight.out_features, weight.in_features
    out_NK = torch.empty((N, K), dtype=weight.dtype, device=weight.device)
    group, bits = weight.spec.group_length(K), weight.spec.bits
    block_k = k_step(group)
    with on_device(out_NK):
        launch(
            _dequantize_weight,
            (ceil_div(N, DEQUANTIZE_ROWS), ceil_div(K, block_k)),
            weight.tensors["packed"],
            weight.tensors["scales"],
            weight.tensors.get("offsets"),
            weight.tensors.get("blocks"),
            out_NK,
            N,
            K,
            STEPS_PER_GROUP=group // block_k,
            GROUPING=grouping(weight.spec, weight.dtype),
            FP4=fp4_words(weight.spec, weight.dtype),
            MAGIC=MAGIC_WORD[weight.dtype],
            OFFSET=code_offset(weight.spec, weight.dtype),
            BITS=bits,
            ROWS=DEQUANTIZE_ROWS,
            BK=block_k,
            TILE_N=TILE_N,
            USE_PTX=uses_ptx(weight.device),
            num_warps=1,
        )
    return out_NK


@triton.jit
def prefetch_groups(
    ptr,
    tile,
    first,
    last,
    groups,
    STEPS_PER_GROUP: tl.constexpr,
    TILE_N: tl.constexpr,
    BN: tl.constexpr,
):
    """Prefetch a block's scales (or offsets) into the L2, up to 128 K steps of them.

    Those of a K step are a line of 128 bytes that no other block reads, so each load in the loop
    would wait for memory: gate_up at 16 rows takes 24 us, without the prefetch 28 us.
    """
    for i in tl.static_range(BN // TILE_N):
        step = tl.minimum(first + tl.arange(0, 128), last - 1)
        ptrs = ptr + ((tile * (BN // TILE_N) + i) * groups + step // STEPS_PER_GROUP) * TILE_N
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptrs], tl.int32, False, 1
        )


@triton.jit(do_not_specialize=["M"])
def _wna16_gemm(
    x_ptr,  # [M, K], or with USE_TMA its descriptor
    packed_ptr,  # [N/64, K/BK, 64, WORDS]
    scales_ptr,  # [N/64, G, 64]; with GROUPING [N/64, K/BK, 64, PARTS, groups]; FP4 without groups
    offsets_ptr,  # [N/64, G, 64] or None
    blocks_ptr,  # [N/64, blocks, 64, PARTS] or None; with FP4 factors [N]
    bias_ptr,  # [N] or None
    y_ptr,  # [M, N]
    partials_ptr,  # [SPLIT, M, N]
    counters_ptr,  # zero, one for each tile
    M,
    N,
    K,
    STEPS_PER_GROUP: tl.constexpr,
    GROUPING: tl.constexpr,  # Grouping, or None: each K step is in one group
    FP4: tl.constexpr,  # Fp4Words, or None: integer codes
    MAGIC: tl.constexpr,
    OFFSET: tl.constexpr,
    BITS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,  # K is divisible by BK
    TILE_N: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    USE_TMA: tl.constexpr,
    PDL: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    WORDS: tl.constexpr = BK * BITS // 32  # words of a row in a K step
    tile_n, split, tile_m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m = tile_m * BM + tl.arange(0, BM)
    row = tl.arange(0, BN)
    n = tile_n * BN + row
    steps = tl.cdiv(K, BK)
    groups = steps // STEPS_PER_GROUP
    first = split * steps // SPLIT
    last = (split + 1) * steps // SPLIT
    # a tile spans one or two stored tiles
    stored_tile = tile_n * (BN // TILE_N) + row // TILE_N
    stored_row = row % TILE_N
    if not USE_TMA:
        x_ptrs = x_ptr + m[None, :] * K + (first * BK + tl.arange(0, BK))[:, None]
    packed_rows = ((stored_tile * steps + first) * TILE_N + stored_row) * WORDS
    packed_ptrs = packed_ptr + packed_rows[:, None] + tl.arange(0, WORDS)[None, :]
    group_rows = stored_tile * groups * TILE_N + stored_row
    if USE_PTX and FP4 is not None:
        prefetch_scales(scales_ptr, tile_n, first, last, steps, FP4, TILE_N, BN)
    elif USE_PTX and GROUPING is not None:
        prefetch_steps(scales_ptr, tile_n, first, last, steps, GROUPING, TILE_N, BN)
    elif USE_PTX:
        prefetch_groups(scales_ptr, tile_n, first, last, groups, STEPS_PER_GROUP, TILE_N, BN)
        if offsets_ptr is not None:
            prefetch_groups(offsets_ptr, tile_n, first, last, groups, STEPS_PER_GROUP, TILE_N, BN)
    if PDL:
        # weights never change; the previous kernel may use x and the workspace until it has ended
        tl.extra.cuda.gdc_wait()

    total = tl.zeros((BN, BM), tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        if USE_TMA:
            x = x_ptr.load([tile_m * BM, step * BK]).T  # [BK, BM]
        elif EVEN:
            x = tl.load(x_ptrs, mask=m[None, :] < M, other=0.0)
            x_ptrs += BK
        else:
            k = step * BK + tl.arange(0, BK)
            x = tl.load(x_ptrs, mask=(m[None, :] < M) & (k[:, None] < K), other=0.0)
            x_ptrs += BK
        packed = tl.load(packed_ptrs, eviction_policy="evict_first")  # [BN, WORDS]
        if FP4 is not None:
            weights = fp4_weights(
                packed,
                scales_ptr,
                stored_tile,
                stored_row,
                step,
                steps,
                FP4,
                BN,
                BK,
                TILE_N,
                DTYPE,
                USE_PTX,
            )
            total = tl.dot(weights, x, total)
        elif GROUPING is not None:
            weights = grouped_weights(
                packed,
                scales_ptr,
                blocks_ptr,
                stored_tile,
                stored_row,
                step,
                steps,
                GROUPING,
                MAGIC,
                OFFSET,
                BITS,
                BN,
                BK,
                TILE_N,
                DTYPE,
                USE_PTX,
            )
            total = tl.dot(weights, x, total)
        else:
            group = group_rows + step // STEPS_PER_GROUP * TILE_N
            scale = tl.load(scales_ptr + group)  # [BN]
            values = unpack(packed, MAGIC, BITS, BN, BK, DTYPE, USE_PTX)
            # the subtraction is exact, so only the sums are rounded
            if offsets_ptr is None:
                codes = values - OFFSET
            else:
                codes = values - tl.load(offsets_ptr + group)[:, None]
            # The scale is converted here. If it were converted where it is loaded, unpacking would
            # wait for it (gate_up at 64 rows: 43.3 us instead of 34.6).
            total += tl.dot(codes.to(DTYPE), x) * scale.to(tl.float32)[:, None]
        packed_ptrs += TILE_N * WORDS

    if PDL:
        # Launch dependents only here. Earlier, waiting blocks of the next kernel would take room on
        # some SMs (qkv, split 4: 8.6 us if launched here, 11.7 us at the top of this kernel).
        tl.extra.cuda.gdc_launch_dependents()
    if GROUPING is not None and USE_PTX:
        total *= 1 / GROUPING.shrink
    if FP4 is not None:
        total *= tl.load(blocks_ptr + n)[:, None]
    mask = (m[None, :] < M) & (n[:, None] < N)
    y_ptrs = y_ptr + m[None, :] * N + n[:, None]
    if SPLIT == 1:
        _store(total, y_ptrs, bias_ptr, n, N, mask)
    else:
        ptrs = partials_ptr + m[None, :] * N + n[:, None]
        counter_ptr = counters_ptr + tile_m * tl.num_programs(0) + tile_n
        if arrives_last(total, ptrs + split * M * N, mask, counter_ptr, SPLIT):
            total = sum_splits(ptrs, M * N, mask, SPLIT)
            _store(total, y_ptrs, bias_ptr, n, N, mask)
            tl.store(counter_ptr, 0)


@triton.jit
def _store(total, y_ptrs, bias_ptr, n, N, mask):
    """Store sums [BN, BM] plus the bias, rounded once."""
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    tl.store(y_ptrs, total.to(y_ptrs.dtype.element_ty), mask=mask)


@triton.jit
def _dequantize_weight(
    packed_ptr,
    scales_ptr,
    offsets_ptr,
    blocks_ptr,
    out_ptr,  # [N, K]
    N,
    K,
    STEPS_PER_GROUP: tl.constexpr,
    GROUPING: tl.constexpr,
    FP4: tl.constexpr,
    MAGIC: tl.constexpr,
    OFFSET: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    TILE_N: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    WORDS: tl.constexpr = BK * BITS // 32
    step = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    steps = tl.cdiv(K, BK)
    tile, stored_row = row // TILE_N, row % TILE_N
    word = ((tile * steps + step) * TILE_N + stored_row)[:, None] * WORDS
    ptrs = packed_ptr + word + tl.arange(0, WORDS)[None, :]
    packed = tl.load(ptrs, eviction_policy="evict_first")
    if FP4 is not None:
        weights = fp4_dequantized(
            packed,
            scales_ptr,
            blocks_ptr,
            tile,
            stored_row,
            step,
            steps,
            FP4,
            ROWS,
            BK,
            TILE_N,
            DTYPE,
        )
    elif GROUPING is not None:
        weights = grouped_weights(
            packed,
            scales_ptr,
            blocks_ptr,
            tile,
            stored_row,
            step,
            steps,
            GROUPING,
            MAGIC,
            OFFSET,
            BITS,
            ROWS,
            BK,
            TILE_N,
            DTYPE,
            False,
        )
    else:
        group = (tile * (steps // STEPS_PER_GROUP) + step // STEPS_PER_GROUP) * TILE_N + stored_row
        scale = tl.load(scales_ptr + group).to(tl.float32)
        values = unpack(packed, MAGIC, BITS, ROWS, BK, DTYPE, USE_PTX).to(tl.float32)
        if offsets_ptr is None:
            codes = values - OFFSET
        else:
            codes = values - tl.load(offsets_ptr + group).to(tl.float32)[:, None]
        weights = codes * scale[:, None]
    k = step * BK + tl.arange(0, BK)[None, :]
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * K + k
    tl.store(out_ptrs, weights.to(DTYPE), mask=(row[:, None] < N) & (k < K))
