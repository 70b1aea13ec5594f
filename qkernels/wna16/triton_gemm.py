"""W4A16 and W8A16 on any GPU and in Triton's interpreter, in Triton. Knows no file format.

The weight is the tensor core's left operand (y^T = W x^T): dequantized codes then stay in
registers, and only x passes through shared memory. Codes lie in the order of the register fragment
(gemm.py), so unpacking moves nothing between threads (README.md has the picture).

Legend: M rows of x, K inputs, N outputs, G groups; BM, BN, BK the tile.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from qkernels.gpu.config import ceil_div
from qkernels.gpu.device import INTERPRETED, has_pdl
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.tma import aligned, describe
from qkernels.gpu.workspace import workspace
from qkernels.linear.prepared import PreparedWeight
from qkernels.wna16.layout import TILE_N, k_step, padded_n
from qkernels.wna16.prepack import offset_of
from qkernels.wna16.triton_config import TritonGemmConfig

# Or-ing a code q into this word's low bits gives a number exactly: 1024 + q in float16 (ten
# mantissa bits), 128 + q in bfloat16 (seven). Both halves of a word are converted at once. bfloat16
# has no room for 8 bits: two halves of the code make q - 128.
MAGIC_WORD = {torch.float16: 0x64006400, torch.bfloat16: 0x43004300}

# One dequantizing block: one warp, so that putting 16 bytes of a row together needs no barrier. All
# sizes tried take the same time: 235 + 60 MB of gate_up in 80 us.
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
            _w4a16,
            grid,
            x,
            weight.tensors["packed"],
            weight.tensors["scales"],
            weight.tensors.get("offsets"),
            bias,
            y_MN,
            partials,
            counters,
            M,
            N,
            K,
            STEPS_OF_GROUP=group // block_k,
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
            INTERPRETED=INTERPRETED,
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
            out_NK,
            N,
            K,
            STEPS_OF_GROUP=group // block_k,
            MAGIC=MAGIC_WORD[weight.dtype],
            OFFSET=offset_of(weight),
            BITS=bits,
            ROWS=DEQUANTIZE_ROWS,
            BK=block_k,
            TILE_N=TILE_N,
            INTERPRETED=INTERPRETED,
            num_warps=1,
        )
    return out_NK


@triton.jit
def _pair(words, MAGIC: tl.constexpr, INTERPRETED: tl.constexpr):
    """The codes at bits 0 and 16 of each word, both or-ed into the magic number.

    One instruction: left to itself the compiler takes two, since an instruction has room for one
    constant. Of 217 instructions for a tile of 64 x 128 that was 27.
    """
    if INTERPRETED:
        return (words & 0x000F000F) | MAGIC
    magic = tl.full(words.shape, MAGIC, tl.int32)
    # 0xEA: (a & b) | c
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, 0x000F000F, $2, 0xEA;", "=r,r,r", [words, magic], tl.int32, True, 1
    )


@triton.jit
def _halves(words, DTYPE: tl.constexpr):
    """Both 16-bit halves of each word as numbers: [..., 2]."""
    low = (words & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True)
    high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _byte_pair(words, MAGIC: tl.constexpr, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """The codes in bits 0..7 and 16..23 of each word: [..., 2] of code + what a 0 is."""
    if DTYPE.is_fp16():
        return _halves((words & 0x00FF00FF) | MAGIC, DTYPE)
    # 16 (128 + high) - 2304 + (128 + low) = code - 128; no step needs more than bfloat16's 8 bits
    low = _halves(_pair(words, MAGIC, INTERPRETED), DTYPE)
    high = _halves(_pair(words >> 4, MAGIC, INTERPRETED), DTYPE)
    return (high * 16.0 - 2304.0).to(DTYPE) + low


@triton.jit
def _unpack(
    words,
    MAGIC: tl.constexpr,
    BITS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Words [BN, WORDS] to [BN, BK] of code + what a 0 is. Reads and writes registers only."""
    if BITS == 8:
        e0 = _byte_pair(words, MAGIC, DTYPE, INTERPRETED)
        e1 = _byte_pair(words >> 8, MAGIC, DTYPE, INTERPRETED)
        # [BN, t, BK/16, e, h] -> [BN, BK/16, h, t, e]
        values = tl.join(e0, e1).reshape(BN, 4, BK // 16, 2, 2)
        return values.trans(0, 2, 4, 1, 3).reshape(BN, BK)
    else:
        p0 = _pair(words, MAGIC, INTERPRETED)
        p1 = _pair(words >> 4, MAGIC, INTERPRETED)
        p2 = _pair(words >> 8, MAGIC, INTERPRETED)
        p3 = _pair(words >> 12, MAGIC, INTERPRETED)
        i0 = tl.join(_halves(p0, DTYPE), _halves(p1, DTYPE))
        i1 = tl.join(_halves(p2, DTYPE), _halves(p3, DTYPE))
        # [BN, t, BK/32, e, h, i] -> [BN, BK/32, i, h, t, e]
        values = tl.join(i0, i1).reshape(BN, 4, BK // 32, 2, 2, 2)
        return values.trans(0, 2, 5, 4, 1, 3).reshape(BN, BK)


@triton.jit
def _prefetch_groups(
    ptr,
    tile,
    first,
    last,
    groups,
    STEPS_OF_GROUP: tl.constexpr,
    TILE_N: tl.constexpr,
    BN: tl.constexpr,
):
    """Ask for the lines of a block's scales (or offsets) at once, up to 128 steps of them.

    Each is 128 bytes that no other block reads, so a load in the loop would wait for memory at
    every step: 24 us in place of 28 on gate_up at 16 rows.
    """
    for i in tl.static_range(BN // TILE_N):
        step = tl.minimum(first + tl.arange(0, 128), last - 1)
        ptrs = ptr + ((tile * (BN // TILE_N) + i) * groups + step // STEPS_OF_GROUP) * TILE_N
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptrs], tl.int32, False, 1
        )


@triton.jit(do_not_specialize=["M"])
def _w4a16(
    x_ptr,  # [M, K], or its descriptor
    words_ptr,  # [N/64, K/BK, 64, WORDS]
    scales_ptr,  # [N/64, G, 64]
    offsets_ptr,  # [N/64, G, 64] or None
    bias_ptr,  # [N] or None
    y_ptr,  # [M, N]
    partials_ptr,  # [SPLIT, M, N]
    counters_ptr,  # zero, one for each output tile
    M,
    N,
    K,
    STEPS_OF_GROUP: tl.constexpr,
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
    INTERPRETED: tl.constexpr,
):
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    WORDS: tl.constexpr = BK * BITS // 32  # of one row and step
    tile_n, part, tile_m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m = tile_m * BM + tl.arange(0, BM)
    row = tl.arange(0, BN)
    n = tile_n * BN + row
    steps = K // BK
    groups = steps // STEPS_OF_GROUP
    first = part * steps // SPLIT
    last = (part + 1) * steps // SPLIT
    # the stored tile and the row in it: BN may span two stored tiles
    stored_tile = tile_n * (BN // TILE_N) + row // TILE_N
    stored_row = row % TILE_N
    if not USE_TMA:
        x_ptrs = x_ptr + m[None, :] * K + (first * BK + tl.arange(0, BK))[:, None]
    words_rows = ((stored_tile * steps + first) * TILE_N + stored_row) * WORDS
    words_ptrs = words_ptr + words_rows[:, None] + tl.arange(0, WORDS)[None, :]
    group_rows = stored_tile * groups * TILE_N + stored_row
    if not INTERPRETED:
        _prefetch_groups(scales_ptr, tile_n, first, last, groups, STEPS_OF_GROUP, TILE_N, BN)
        if offsets_ptr is not None:
            _prefetch_groups(offsets_ptr, tile_n, first, last, groups, STEPS_OF_GROUP, TILE_N, BN)
    if PDL:
        # weights never change; x, and the workspace, are the previous kernel's until it ends
        tl.extra.cuda.gdc_wait()

    total = tl.zeros((BN, BM), tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        if USE_TMA:
            x = x_ptr.load([tile_m * BM, step * BK]).T  # [BK, BM]
        else:
            x = tl.load(x_ptrs, mask=m[None, :] < M, other=0.0)
            x_ptrs += BK
        words = tl.load(words_ptrs, eviction_policy="evict_first")  # [BN, WORDS]
        group = group_rows + step // STEPS_OF_GROUP * TILE_N
        scale = tl.load(scales_ptr + group)  # [BN]
        values = _unpack(words, MAGIC, BITS, BN, BK, DTYPE, INTERPRETED)
        # the subtraction is exact, so W's only rounding is the accumulator's
        if offsets_ptr is None:
            codes = values - OFFSET
        else:
            codes = values - tl.load(offsets_ptr + group)[:, None]
        # converted here, not where it is loaded: there the compiler waits for it before it unpacks
        # (gate_up at 64 rows: 34.6 us, not 43.3)
        total += tl.dot(codes.to(DTYPE), x) * scale.to(tl.float32)[:, None]
        words_ptrs += TILE_N * WORDS

    if PDL:
        # now, not sooner: the next kernel's waiting blocks would crowd some SMs (qkv in 4 parts:
        # 8.6 us without, 11.7 us when this stood at the top)
        tl.extra.cuda.gdc_launch_dependents()
    inside = (m[None, :] < M) & (n[:, None] < N)
    y_ptrs = y_ptr + m[None, :] * N + n[:, None]
    if SPLIT == 1:
        if bias_ptr is not None:
            total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        tl.store(y_ptrs, total.to(DTYPE), mask=inside)
    else:
        partials_ptrs = partials_ptr + m[None, :] * N + n[:, None]
        tl.store(partials_ptrs + part * M * N, total, mask=inside)
        # every thread's partial sums are out before one thread counts the block in
        tl.debug_barrier()
        counter = counters_ptr + tile_m * tl.num_programs(0) + tile_n
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLIT - 1:
            # the last block adds all parts in order, so the bits do not depend on who came last
            total = tl.zeros((BN, BM), tl.float32)
            for i in tl.static_range(SPLIT):
                # .cg: other SMs wrote these, and this SM's L1 does not know
                total += tl.load(
                    partials_ptrs + i * M * N, mask=inside, other=0.0, cache_modifier=".cg"
                )
            if bias_ptr is not None:
                total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
            tl.store(y_ptrs, total.to(DTYPE), mask=inside)
            tl.store(counter, 0)


@triton.jit
def _dequantize_weight(
    words_ptr,
    scales_ptr,
    offsets_ptr,
    out_ptr,  # [N, K]
    N,
    K,
    STEPS_OF_GROUP: tl.constexpr,
    MAGIC: tl.constexpr,
    OFFSET: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    TILE_N: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    WORDS: tl.constexpr = BK * BITS // 32
    step = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    steps = K // BK
    tile, stored_row = row // TILE_N, row % TILE_N
    word = ((tile * steps + step) * TILE_N + stored_row)[:, None] * WORDS
    words = tl.load(words_ptr + word + tl.arange(0, WORDS)[None, :], eviction_policy="evict_first")
    group = (tile * (steps // STEPS_OF_GROUP) + step // STEPS_OF_GROUP) * TILE_N + stored_row
    scale = tl.load(scales_ptr + group).to(tl.float32)
    values = _unpack(words, MAGIC, BITS, ROWS, BK, DTYPE, INTERPRETED).to(tl.float32)
    if offsets_ptr is None:
        codes = values - OFFSET
    else:
        codes = values - tl.load(offsets_ptr + group).to(tl.float32)[:, None]
    k = step * BK + tl.arange(0, BK)[None, :]
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * K + k
    tl.store(out_ptrs, (codes * scale[:, None]).to(DTYPE), mask=row[:, None] < N)
