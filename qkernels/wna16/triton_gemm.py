"""W4A16 and W8A16 in Triton, for any GPU and for Triton's interpreter.

The weight is operand A of the tensor core (y^T = W x^T): dequantized codes then stay in registers,
and only x goes through shared memory. Codes are prepacked in the order of the register fragment
(prepack.py), so unpacking stays within each thread (notes/layouts.md). On NVIDIA GPUs
USE_PTX switches two pieces of inline PTX on; the results are the same without them.

Legend: M rows of x, K inputs, N outputs, G groups; BM, BN, BK the tile.
"""

from typing import NamedTuple

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
from qkernels.wna16.layout import TILE_N, GroupedSpec, k_step, padded_n
from qkernels.wna16.prepack import offset_of
from qkernels.wna16.triton_config import TritonGemmConfig

# A code q or-ed into the low bits of each half of this word is exactly 1024 + q in float16 (ten
# mantissa bits) and 128 + q in bfloat16 (seven). bfloat16 has no room for 8 bits: two nibbles make
# q - 128.
MAGIC_WORD = {torch.float16: 0x64006400, torch.bfloat16: 0x43004300}

# Rows of a block of _dequantize_weight: one warp, so that a row's 16 bytes are gathered without a
# barrier. All sizes that were tried take the same time: 80 us for gate_up, 60 MB to 235 MB.
DEQUANTIZE_ROWS = 16


def run(
    x_MK: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None,
    config: TritonGemmConfig,
) -> torch.Tensor:
    """x [M, K], contiguous, to [M, N]."""
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
            GROUPING=grouping(weight),
            MAGIC=MAGIC_WORD[x_MK.dtype],
            OFFSET=offset_of(weight),
            BITS=weight.spec.bits,
            BM=config.block_m,
            BN=config.block_n,
            BK=block_k,
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
    """The weight [N, K] in its activation dtype, rounded as PackedWeight.dequantize rounds."""
    N, K = weight.out_features, weight.in_features
    out_NK = torch.empty((N, K), dtype=weight.dtype, device=weight.device)
    group, bits = weight.spec.group_length(K), weight.spec.bits
    block_k = k_step(group)
    with on_device(out_NK):
        launch(
            _dequantize_weight,
            (ceil_div(N, DEQUANTIZE_ROWS), K // block_k),
            weight.tensors["packed"],
            weight.tensors["scales"],
            weight.tensors.get("offsets"),
            weight.tensors.get("blocks"),
            out_NK,
            N,
            K,
            STEPS_PER_GROUP=group // block_k,
            GROUPING=grouping(weight),
            MAGIC=MAGIC_WORD[weight.dtype],
            OFFSET=offset_of(weight),
            BITS=bits,
            ROWS=DEQUANTIZE_ROWS,
            BK=block_k,
            TILE_N=TILE_N,
            USE_PTX=uses_ptx(weight.device),
            num_warps=1,
        )
    return out_NK


class Grouping(NamedTuple):
    """Groups of a K step, a constexpr of the kernels (layout.GroupedSpec)."""

    group: int  # inputs of a group
    groups: int  # of a K step
    has_minima: bool
    steps_per_block: int  # K steps that share d and dmin; 0: there are none


def grouping(weight: PreparedWeight) -> Grouping | None:
    """The groups of a weight's K steps; None: a K step has one scale."""
    spec = weight.spec
    if not isinstance(spec, GroupedSpec):
        return None
    return Grouping(spec.group, spec.groups, not spec.symmetric, spec.steps_per_block)


@triton.jit
def _or_into_magic(packed, MAGIC: tl.constexpr, USE_PTX: tl.constexpr):
    """The codes at bits 0 and 16 of each word, both or-ed into the magic number.

    The PTX is one instruction. The compiler makes two of the expression, because an instruction has
    room for one constant: 27 more to the 217 of a 64 x 128 tile.
    """
    if not USE_PTX:
        return (packed & 0x000F000F) | MAGIC
    magic = tl.full(packed.shape, MAGIC, tl.int32)
    # 0xEA: (a & b) | c
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, 0x000F000F, $2, 0xEA;", "=r,r,r", [packed, magic], tl.int32, True, 1
    )


@triton.jit
def _unpack_x2(words, DTYPE: tl.constexpr):
    """Both 16-bit values of each word: [..., 2]."""
    low = (words & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True)
    high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _unpack_bytes(packed, MAGIC: tl.constexpr, DTYPE: tl.constexpr, USE_PTX: tl.constexpr):
    """The codes in bits 0..7 and 16..23 of each word: [..., 2] of code + the value of a 0."""
    if DTYPE.is_fp16():
        return _unpack_x2((packed & 0x00FF00FF) | MAGIC, DTYPE)
    # 16 (128 + high) - 2304 + (128 + low) = code - 128; no term needs more than bfloat16's 8 bits
    low = _unpack_x2(_or_into_magic(packed, MAGIC, USE_PTX), DTYPE)
    high = _unpack_x2(_or_into_magic(packed >> 4, MAGIC, USE_PTX), DTYPE)
    return (high * 16.0 - 2304.0).to(DTYPE) + low


@triton.jit
def unpack(
    packed,
    MAGIC: tl.constexpr,
    BITS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    DTYPE: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    """Packed words [BN, WORDS] to [BN, BK] of code + the value of a 0, within each thread."""
    if BITS == 8:
        e0 = _unpack_bytes(packed, MAGIC, DTYPE, USE_PTX)
        e1 = _unpack_bytes(packed >> 8, MAGIC, DTYPE, USE_PTX)
        # [BN, t, BK/16, e, h] -> [BN, BK/16, h, t, e]
        values = tl.join(e0, e1).reshape(BN, 4, BK // 16, 2, 2)
        return values.trans(0, 2, 4, 1, 3).reshape(BN, BK)
    else:
        p0 = _or_into_magic(packed, MAGIC, USE_PTX)
        p1 = _or_into_magic(packed >> 4, MAGIC, USE_PTX)
        p2 = _or_into_magic(packed >> 8, MAGIC, USE_PTX)
        p3 = _or_into_magic(packed >> 12, MAGIC, USE_PTX)
        i0 = tl.join(_unpack_x2(p0, DTYPE), _unpack_x2(p1, DTYPE))
        i1 = tl.join(_unpack_x2(p2, DTYPE), _unpack_x2(p3, DTYPE))
        # [BN, t, BK/32, e, h, i] -> [BN, BK/32, i, h, t, e]
        values = tl.join(i0, i1).reshape(BN, 4, BK // 32, 2, 2, 2)
        return values.trans(0, 2, 5, 4, 1, 3).reshape(BN, BK)


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

    Each is a line of 128 bytes that no other block reads, so each load in the loop would wait for
    memory: gate_up at 16 rows takes 24 us, and 28 without the prefetch.
    """
    for i in tl.static_range(BN // TILE_N):
        step = tl.minimum(first + tl.arange(0, 128), last - 1)
        ptrs = ptr + ((tile * (BN // TILE_N) + i) * groups + step // STEPS_PER_GROUP) * TILE_N
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptrs], tl.int32, False, 1
        )


@triton.jit
def _group_scales(
    scales_ptr,
    blocks_ptr,
    stored_tile,
    stored_row,
    step,
    steps,
    PART: tl.constexpr,
    GROUPING: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Scales (PART 0) or minima (PART 1) of rows and of the groups of a K step, exact in float32.

    A quantized one has up to 8 bits and d up to 11.
    """
    PARTS: tl.constexpr = 2 if GROUPING.has_minima else 1
    GROUPS: tl.constexpr = GROUPING.groups
    row = (stored_tile * steps + step) * TILE_N + stored_row
    ptrs = scales_ptr + ((row * PARTS + PART) * GROUPS)[:, None] + tl.arange(0, GROUPS)[None, :]
    values = tl.load(ptrs).to(tl.float32)  # [BN, GROUPS]
    if GROUPING.steps_per_block > 0:
        blocks = steps // GROUPING.steps_per_block
        block = (stored_tile * blocks + step // GROUPING.steps_per_block) * TILE_N + stored_row
        whole = tl.load(blocks_ptr + block * PARTS + PART)
        values *= whole.to(tl.float32)[:, None]
    return values


@triton.jit
def _grouped_weights(
    values,
    scales_ptr,
    blocks_ptr,
    stored_tile,
    stored_row,
    step,
    steps,
    GROUPING: tl.constexpr,
    OFFSET: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Unpacked codes [BN, BK] of a K step to weights, float32: those that gguf-py computes.

    A code times its scale has up to 24 bits, which float32 holds; the subtraction rounds.
    """
    codes = (values - OFFSET).to(tl.float32).reshape(BN, GROUPING.groups, GROUPING.group)
    scales = _group_scales(
        scales_ptr, blocks_ptr, stored_tile, stored_row, step, steps, 0, GROUPING, TILE_N
    )
    weights = codes * scales[:, :, None]
    if GROUPING.has_minima:
        minima = _group_scales(
            scales_ptr, blocks_ptr, stored_tile, stored_row, step, steps, 1, GROUPING, TILE_N
        )
        weights -= minima[:, :, None]
    return weights.reshape(BN, BK)


@triton.jit
def _prefetch_steps(
    scales_ptr,
    tile,
    first,
    last,
    steps,
    GROUPING: tl.constexpr,
    TILE_N: tl.constexpr,
    BN: tl.constexpr,
):
    """prefetch_groups of K steps with several groups: the lines of 128 bytes of each step."""
    PARTS: tl.constexpr = 2 if GROUPING.has_minima else 1
    VALUES: tl.constexpr = PARTS * GROUPING.groups * TILE_N  # of a step
    LINE: tl.constexpr = 1024 // scales_ptr.dtype.element_ty.primitive_bitwidth
    for i in tl.static_range(BN // TILE_N):
        for line in tl.static_range(VALUES // LINE):
            step = tl.minimum(first + tl.arange(0, 128), last - 1)
            ptrs = scales_ptr + ((tile * (BN // TILE_N) + i) * steps + step) * VALUES + line * LINE
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptrs], tl.int32, False, 1
            )


@triton.jit(do_not_specialize=["M"])
def _wna16_gemm(
    x_ptr,  # [M, K], or with USE_TMA its descriptor
    packed_ptr,  # [N/64, K/BK, 64, WORDS]
    scales_ptr,  # [N/64, G, 64]; with GROUPING [N/64, K/BK, 64, PARTS, groups]
    offsets_ptr,  # [N/64, G, 64] or None
    blocks_ptr,  # [N/64, blocks, 64, PARTS] or None
    bias_ptr,  # [N] or None
    y_ptr,  # [M, N]
    partials_ptr,  # [SPLIT, M, N]
    counters_ptr,  # zero, one for each tile
    M,
    N,
    K,
    STEPS_PER_GROUP: tl.constexpr,
    GROUPING: tl.constexpr,  # Grouping, or None: each K step is in one group
    MAGIC: tl.constexpr,
    OFFSET: tl.constexpr,
    BITS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TILE_N: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    USE_TMA: tl.constexpr,
    PDL: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    WORDS: tl.constexpr = BK * BITS // 32  # of a row and K step
    tile_n, split, tile_m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m = tile_m * BM + tl.arange(0, BM)
    row = tl.arange(0, BN)
    n = tile_n * BN + row
    steps = K // BK
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
    if USE_PTX and GROUPING is not None:
        _prefetch_steps(scales_ptr, tile_n, first, last, steps, GROUPING, TILE_N, BN)
    elif USE_PTX:
        prefetch_groups(scales_ptr, tile_n, first, last, groups, STEPS_PER_GROUP, TILE_N, BN)
        if offsets_ptr is not None:
            prefetch_groups(offsets_ptr, tile_n, first, last, groups, STEPS_PER_GROUP, TILE_N, BN)
    if PDL:
        # weights never change; x and the workspace are the previous kernel's until it has ended
        tl.extra.cuda.gdc_wait()

    total = tl.zeros((BN, BM), tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        if USE_TMA:
            x = x_ptr.load([tile_m * BM, step * BK]).T  # [BK, BM]
        else:
            x = tl.load(x_ptrs, mask=m[None, :] < M, other=0.0)
            x_ptrs += BK
        packed = tl.load(packed_ptrs, eviction_policy="evict_first")  # [BN, WORDS]
        if GROUPING is not None:
            values = unpack(packed, MAGIC, BITS, BN, BK, DTYPE, USE_PTX)
            weights = _grouped_weights(
                values,
                scales_ptr,
                blocks_ptr,
                stored_tile,
                stored_row,
                step,
                steps,
                GROUPING,
                OFFSET,
                BN,
                BK,
                TILE_N,
            )
            # rounded to the bits of KWeight.dequantize
            total = tl.dot(weights.to(DTYPE), x, total)
        else:
            group = group_rows + step // STEPS_PER_GROUP * TILE_N
            scale = tl.load(scales_ptr + group)  # [BN]
            values = unpack(packed, MAGIC, BITS, BN, BK, DTYPE, USE_PTX)
            # the subtraction is exact, so only the sums are rounded
            if offsets_ptr is None:
                codes = values - OFFSET
            else:
                codes = values - tl.load(offsets_ptr + group)[:, None]
            # The scale is converted here. Where it is loaded, the compiler would wait for it before
            # it unpacks (gate_up at 64 rows: 43.3 us instead of 34.6).
            total += tl.dot(codes.to(DTYPE), x) * scale.to(tl.float32)[:, None]
        packed_ptrs += TILE_N * WORDS

    if PDL:
        # Not earlier: the next kernel's waiting blocks would take room on some SMs (qkv, split 4:
        # 11.7 us at the top of this kernel, 8.6 us here).
        tl.extra.cuda.gdc_launch_dependents()
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
    """Sums [BN, BM] plus the bias, rounded once."""
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
    steps = K // BK
    tile, stored_row = row // TILE_N, row % TILE_N
    word = ((tile * steps + step) * TILE_N + stored_row)[:, None] * WORDS
    ptrs = packed_ptr + word + tl.arange(0, WORDS)[None, :]
    packed = tl.load(ptrs, eviction_policy="evict_first")
    if GROUPING is not None:
        values = unpack(packed, MAGIC, BITS, ROWS, BK, DTYPE, USE_PTX)
        weights = _grouped_weights(
            values,
            scales_ptr,
            blocks_ptr,
            tile,
            stored_row,
            step,
            steps,
            GROUPING,
            OFFSET,
            ROWS,
            BK,
            TILE_N,
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
    tl.store(out_ptrs, weights.to(DTYPE), mask=row[:, None] < N)
