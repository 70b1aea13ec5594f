"""y = x W^T with 8-bit weights and 8-bit activations, in Triton.

Integer codes are summed exactly in int32, float8 codes in float32. The epilogue multiplies the sum
by the scales of the row and of the output. Weight and codes are loaded by TMA, which pads edge
tiles with zeros, or through pointers on GPUs without TMA. The only PTX is a prefetch in launches
with PDL, on sm_90 or later.

Legend: M rows of x, K inputs, N outputs; BM, BN, BK the tile. A and B are the operands of the
matrix multiply: the weight and x with WEIGHT_IS_A, else x and the weight.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from formats.in_memory.fp8 import Fp8Weight
from formats.in_memory.weights import Weight
from qkernels.gpu.config import ceil_div
from qkernels.gpu.device import has_pdl, has_tma, shared_bytes, sm_count
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.split_k_reduce_triton import arrives_last, sum_splits
from qkernels.gpu.tma import describe
from qkernels.gpu.workspace import workspace
from qkernels.linear.plan import GemmPlan, GemmProblem, plan_without_choice
from qkernels.linear.prepared import PreparedWeight
from qkernels.operands.codes import Codes
from qkernels.operands.split_k import Consumer
from qkernels.tuning.table import tuning_table_of
from qkernels.w8a8.config import (
    W8A8TritonConfig,
    default_w8a8_triton_config,
    fitted,
    without_tma,
)
from qkernels.w8a8.tuned import TUNED

BLOCK = 128  # inputs and outputs of a block of a block-scaled float8 weight


def prepare_weight(
    packed: Weight, dtype: torch.dtype, device: torch.device | str | None = None
) -> PreparedWeight:
    """Return signed codes [N, K] and float32 scales, one per output or per block [N/128, K/128]."""
    packed = packed if device is None else packed.to(device)
    if isinstance(packed, Fp8Weight):
        codes_NK, scales = packed.codes_NK, packed.scales_RC
    else:
        codes_NK = (packed.codes().to(torch.int16) - packed.spec.symmetric_zero).to(torch.int8)
        scales = packed.scales_NG
    scales = scales.float().contiguous()
    if packed.activation.per != "group":
        scales = scales.flatten().expand(packed.out_features).contiguous()
    tensors = {"codes": codes_NK.contiguous(), "scales": scales}
    workspace(packed.device)
    return PreparedWeight.of(
        packed, kernel="triton_w8a8", tensors=tensors, dtype=dtype, rounds_input=True
    )


def plan(
    problem: GemmProblem, M: int, consumer: Consumer | None = None, *, fused: bool = True
) -> GemmPlan:
    """Return the plan for M rows; the previous operation rounds the input if it can."""
    N, K, activation = problem.out_features, problem.in_features, problem.activation
    config = _chosen_config(problem.device, M, N, K, activation.type == "int")
    return replace(plan_without_choice(problem), variant="triton", config=config)


def run(
    plan: GemmPlan, x: Codes, weight: PreparedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply codes [M, K] to [M, N], rounded once to the weight's dtype."""
    return linear_codes(*x, weight, bias, config=plan.config)


def linear_codes(
    codes_MK: torch.Tensor,
    scales_M1: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None = None,
    *,
    config: W8A8TritonConfig | None = None,
) -> torch.Tensor:
    """Implement ops.linear_codes, deterministic. `config` replaces the tuned or default config."""
    N, K = weight.out_features, weight.in_features
    M = codes_MK.shape[0]
    y_MN = torch.empty((M, N), dtype=weight.dtype, device=codes_MK.device)
    if M == 0:
        return y_MN
    device, integers = codes_MK.device, codes_MK.dtype == torch.int8
    config = config or _chosen_config(device, M, N, K, integers)
    blocks = weight.tensors["scales"].ndim == 2
    if blocks:
        config = replace(config, block_k=BLOCK)
    pdl = config.pdl and has_pdl(device)
    codes_MK, codes_NK = codes_MK.contiguous(), weight.tensors["codes"]
    x, w = codes_MK, codes_NK
    if config.use_tma:
        x = describe(TensorDescriptor, codes_MK, (config.block_m, config.block_k))
        w = describe(TensorDescriptor, codes_NK, (config.block_n, config.block_k))
    partials, counters = workspace(device)
    grid = (ceil_div(N, config.block_n) * ceil_div(M, config.block_m), config.split)
    with on_device(codes_MK):
        launch(
            _w8a8,
            grid,
            x,
            w,
            codes_NK,
            scales_M1.contiguous(),
            weight.tensors["scales"],
            bias,
            y_MN,
            partials.view(torch.int32) if integers else partials,
            counters,
            M,
            N,
            K,
            BM=config.block_m,
            BN=config.block_n,
            BK=config.block_k,
            SPLIT=config.split,
            STAGES=config.stages,
            GROUP_M=config.group_m,
            WEIGHT_IS_A=config.weight_is_a,
            USE_TMA=config.use_tma,
            WHOLE_STEPS=K % config.block_k == 0,
            PDL=pdl,
            BLOCKS=blocks,
            num_warps=config.warps,
            **({"launch_pdl": True} if pdl else {}),
        )
    return y_MN


def _chosen_config(
    device: torch.device, M: int, N: int, K: int, integers: bool
) -> W8A8TritonConfig:
    """Return the config measured on this GPU, else the default."""
    row = tuning_table_of(device).find(TUNED, N=N, K=K, integers=integers, M=M)
    if row is not None and isinstance(row.config, W8A8TritonConfig):
        config = row.config
    else:
        default = default_w8a8_triton_config(M, N, K, sm_count(device), integers)
        config = fitted(default, shared_bytes(device))
    return config if has_tma(device) else without_tma(config)


@triton.jit
def _prefetch_rows(ptr, n, first, N, K, num_bytes):
    """Prefetch into the L2 the first `num_bytes` of each weight row, in the block's split of K."""
    ptrs = ptr + tl.minimum(n, N - 1).to(tl.int64) * K + first
    sizes = tl.zeros_like(n) + num_bytes
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [ptrs, sizes],
        tl.int32,
        False,
        1,
    )


@triton.jit
def _code_ptrs(ptr, row, rows, k, K):
    """Return pointers to codes [rows, K] at `row` and `k`. Rows after the last repeat the last."""
    return ptr + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * K + k[None, :]


@triton.jit
def _load_codes(ptrs, left, BK: tl.constexpr, WHOLE_STEPS: tl.constexpr):
    """Load a K step's codes; `left` inputs remain, and codes after them become zeros."""
    if WHOLE_STEPS:
        return tl.load(ptrs)
    else:
        zero = tl.zeros((), tl.float32).to(ptrs.dtype.element_ty)
        return tl.load(ptrs, mask=tl.arange(0, BK)[None, :] < left, other=zero)


@triton.jit
def _store_scaled(
    total,
    input_scales_ptr,
    scales_ptr,
    bias_ptr,
    y_ptr,
    m,
    n,
    M,
    N,
    BLOCKS: tl.constexpr,
):
    """Store sums [BM, BN] times both scales, plus bias, rounded once."""
    y = total.to(tl.float32)
    if not BLOCKS:
        input_scales = tl.load(input_scales_ptr + m, mask=m < M, other=0.0)
        scales = tl.load(scales_ptr + n, mask=n < N, other=0.0)
        y = y * input_scales[:, None] * scales[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    inside = (m[:, None] < M) & (n[None, :] < N)
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def _w8a8(
    x,  # the codes [M, K], with USE_TMA their descriptor
    weight,  # the codes [N, K], with USE_TMA their descriptor
    weight_ptr,  # the codes [N, K]
    input_scales_ptr,  # [M]; BLOCKS: [M, K / 128]
    scales_ptr,  # [N]; BLOCKS: [N / 128, K / 128]
    bias_ptr,  # [N] or None
    y_ptr,  # [M, N]
    partials_ptr,  # [SPLIT, M, N]
    counters_ptr,  # zero, one for each output tile
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP_M: tl.constexpr,
    WEIGHT_IS_A: tl.constexpr,
    USE_TMA: tl.constexpr,
    WHOLE_STEPS: tl.constexpr,  # K is divisible by BK
    PDL: tl.constexpr,
    BLOCKS: tl.constexpr,  # one scale per 128 inputs of x, and per 128 x 128 of the weight
):
    SUM: tl.constexpr = partials_ptr.dtype.element_ty
    # blocks that run at the same time share rows of x and of the weight, which stay in the L2
    tile, split = tl.program_id(0), tl.program_id(1)
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    group = tile // (GROUP_M * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    inside = tile % (GROUP_M * tiles_n)
    tile_m = group * GROUP_M + inside % height
    tile_n = inside // height
    m = tile_m * BM + tl.arange(0, BM)
    n = tile_n * BN + tl.arange(0, BN)
    steps = tl.cdiv(K, BK)
    first = split * steps // SPLIT
    last = (split + 1) * steps // SPLIT
    if PDL:
        num_bytes = tl.minimum(tl.minimum(last * BK, K) - first * BK, 4 * BK)
        _prefetch_rows(weight_ptr, n, first * BK, N, K, num_bytes)
        # weights never change; the previous kernel may use codes and workspace until it has ended
        tl.extra.cuda.gdc_wait()

    if not USE_TMA:
        k = first * BK + tl.arange(0, BK)
        x_ptrs = _code_ptrs(x, m, M, k, K)
        weight_ptrs = _code_ptrs(weight, n, N, k, K)
    total = tl.zeros((BN, BM) if WEIGHT_IS_A else (BM, BN), SUM)
    for step in tl.range(first, last, num_stages=STAGES):
        if USE_TMA:
            x_codes = x.load([tile_m * BM, step * BK])
            weight_codes = weight.load([tile_n * BN, step * BK])
        else:
            left = K - step * BK
            x_codes = _load_codes(x_ptrs, left, BK, WHOLE_STEPS)
            weight_codes = _load_codes(weight_ptrs, left, BK, WHOLE_STEPS)
            x_ptrs += BK
            weight_ptrs += BK
        # the tensor core keeps 14 bits of a float8 sum: add it in float32 every 128 inputs
        if BLOCKS:
            input_scales = tl.load(input_scales_ptr + m * steps + step, mask=m < M, other=0.0)
            scales = tl.load(scales_ptr + n // BK * steps + step, mask=n < N, other=0.0)
            if WEIGHT_IS_A:
                part_sum = tl.dot(weight_codes, x_codes.T, out_dtype=SUM)
                total += part_sum * scales[:, None] * input_scales[None, :]
            else:
                part_sum = tl.dot(x_codes, weight_codes.T, out_dtype=SUM)
                total += part_sum * input_scales[:, None] * scales[None, :]
        elif WEIGHT_IS_A:
            total = tl.dot(weight_codes, x_codes.T, total, max_num_imprecise_acc=128, out_dtype=SUM)
        else:
            total = tl.dot(x_codes, weight_codes.T, total, max_num_imprecise_acc=128, out_dtype=SUM)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if WEIGHT_IS_A:
        total = total.T
    if SPLIT == 1:
        _store_scaled(
            total,
            input_scales_ptr,
            scales_ptr,
            bias_ptr,
            y_ptr,
            m,
            n,
            M,
            N,
            BLOCKS,
        )
    else:
        mask = (m[:, None] < M) & (n[None, :] < N)
        ptrs = partials_ptr + m[:, None] * N + n[None, :]
        counter_ptr = counters_ptr + tile
        if arrives_last(total, ptrs + split * M * N, mask, counter_ptr, SPLIT):
            total = sum_splits(ptrs, M * N, mask, SPLIT)
            _store_scaled(
                total,
                input_scales_ptr,
                scales_ptr,
                bias_ptr,
                y_ptr,
                m,
                n,
                M,
                N,
                BLOCKS,
            )
            tl.store(counter_ptr, 0)
