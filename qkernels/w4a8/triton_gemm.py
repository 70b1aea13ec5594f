"""W4A8 in Triton, for any GPU and for Triton's interpreter: y^T = W x^T.

The weight is operand A: its codes are expanded to int8 or e4m3, exactly, and multiplied without
scales. The sum of a group (integer, or the tensor core's for float8) is added to a float32 total
with one fused multiply-add by the group's scale. With one scale per output, codes are summed as
integers to the end. On NVIDIA GPUs USE_PTX enables a piece of inline PTX; the results are the same
without it.

Legend: M rows of x, K inputs, N outputs, G groups; BM, BN, BK the tile.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from formats.in_memory.packed import PackedWeight
from qkernels.choice import FIXED_ORDER
from qkernels.gpu.config import ceil_div
from qkernels.gpu.device import has_pdl, has_tma, sm_count, uses_ptx
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.split_k_reduce_triton import arrives_last, sum_splits
from qkernels.gpu.tma import aligned, describe
from qkernels.gpu.workspace import workspace
from qkernels.linear.plan import GemmPlan, GemmProblem, plan_without_choice
from qkernels.linear.prepared import PreparedWeight
from qkernels.operands.codes import Codes
from qkernels.operands.split_k import Consumer
from qkernels.tuning.table import tuning_table_of
from qkernels.w4a8.config import W4A8TritonConfig, default_triton_config
from qkernels.w4a8.layout import FLOAT8_PTX, INT8_PTX, TILE_N, code_factor, k_step
from qkernels.w4a8.prepack import prepacked
from qkernels.w4a8.tuned import TUNED


def prepare_weight(
    packed: PackedWeight, dtype: torch.dtype, device: torch.device | str | None = None
) -> PreparedWeight:
    """Prepack codes in K steps that lie within one group, and scales by group or by output."""
    block_k = k_step(packed.spec.group_length(packed.in_features))
    return prepacked(packed, dtype, device, kernel="triton_w4a8", block_k=block_k)


def plan(
    problem: GemmProblem, M: int, consumer: Consumer | None = None, *, fused: bool = True
) -> GemmPlan:
    """Return the plan for M rows; the previous operation rounds the input if it can."""
    config = _chosen_config(problem, M)
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
    config: W4A8TritonConfig | None = None,
) -> torch.Tensor:
    """Implement ops.linear_codes, deterministic. `config` replaces the tuned or default config."""
    (M, K), N = codes_MK.shape, weight.out_features
    device = codes_MK.device
    y_MN = torch.empty((M, N), dtype=weight.dtype, device=device)
    if M == 0:
        return y_MN
    config = config or _chosen_config(weight.problem, M)
    group = weight.problem.group
    block_k = k_step(group)
    in_groups = group != K
    integers = codes_MK.dtype == torch.int8
    pdl = config.pdl and has_pdl(device)
    use_tma = config.use_tma and has_tma(device)
    codes_MK = codes_MK.contiguous()
    x = codes_MK
    if use_tma:
        x = describe(TensorDescriptor, aligned(codes_MK), (config.block_m, block_k))
    partials, counters = workspace(device)
    with on_device(codes_MK):
        launch(
            _w4a8,
            (ceil_div(N, config.block_n), config.split, ceil_div(M, config.block_m)),
            x,
            weight.tensors["packed"],
            scales_M1.contiguous(),
            weight.tensors["scales"],
            bias,
            y_MN,
            partials.view(torch.int32) if integers and not in_groups else partials,
            counters,
            M,
            N,
            K,
            STEPS_PER_GROUP=group // block_k if in_groups else 0,
            FACTOR=code_factor(weight.activation.type),
            BM=config.block_m,
            BN=config.block_n,
            BK=block_k,
            TILE_N=TILE_N,
            SPLIT=config.split,
            STAGES=config.stages,
            INTEGERS=integers,
            USE_TMA=use_tma,
            PDL=pdl,
            USE_PTX=uses_ptx(device),
            num_warps=config.warps,
            **({"launch_pdl": True} if pdl else {}),
        )
    return y_MN


def _chosen_config(problem: GemmProblem, M: int) -> W4A8TritonConfig:
    """Return the config measured on this GPU, else the default.

    In fixed order, K is not split if groups are added in float32.
    """
    N, K, group = problem.out_features, problem.in_features, problem.group
    integers = problem.activation.type == "int"
    row = tuning_table_of(problem.device).find(TUNED, N=N, K=K, group=group, integers=integers, M=M)
    if row is not None and isinstance(row.config, W4A8TritonConfig):
        config = row.config
    else:
        config = default_triton_config(M, N, K, k_step(group), sm_count(problem.device))
    config = replace(config, split=min(config.split, K // k_step(group)))
    if problem.requested == FIXED_ORDER and group != K:
        config = replace(config, split=1)
    return config


_TO_INT8, _TO_FLOAT8 = tl.constexpr(INT8_PTX), tl.constexpr(FLOAT8_PTX)


@triton.jit
def _expanded(packed, INTEGERS: tl.constexpr, USE_PTX: tl.constexpr):
    """Convert bytes of two codes to 8-bit numbers. Return (low codes, high codes)."""
    if USE_PTX:
        PTX: tl.constexpr = _TO_INT8 if INTEGERS else _TO_FLOAT8
        low, high = tl.inline_asm_elementwise(
            PTX, "=r,=r,r", [packed], (tl.uint8, tl.uint8), is_pure=True, pack=4
        )
    elif INTEGERS:
        low, high = (packed << 4) ^ 0x80, (packed & 0xF0) ^ 0x80
    else:
        low, high = packed & 0x0F, packed >> 4
        low, high = low + (low >> 3) * 0x79, high + (high >> 3) * 0x79
    if INTEGERS:
        return low.to(tl.int8, bitcast=True), high.to(tl.int8, bitcast=True)
    else:
        return low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)


@triton.jit
def expanded_weights(
    packed, INTEGERS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, USE_PTX: tl.constexpr
):
    """Convert packed codes [BN, BK / 2] to operand A [BN, BK], in the order of the inputs."""
    low, high = _expanded(packed, INTEGERS, USE_PTX)
    # [BN, t, c, j, h] -> [BN, c, h, t, j]
    values = tl.join(low, high).reshape(BN, 4, BK // 32, 4, 2)
    return values.trans(0, 2, 4, 1, 3).reshape(BN, BK)


@triton.jit
def _store_scaled(
    total, input_scales_ptr, scales_ptr, bias_ptr, y_ptr, m, n, M, N, OUTPUT_SCALES: tl.constexpr
):
    """Store sums [BN, BM] times the scales not yet applied, plus the bias, rounded once."""
    y = total.to(tl.float32) * tl.load(input_scales_ptr + m, mask=m < M, other=0.0)[None, :]
    if OUTPUT_SCALES:
        y *= tl.load(scales_ptr + n, mask=n < N, other=0.0)[:, None]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    ptrs = y_ptr + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(ptrs, y.to(y_ptr.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["M"])
def _w4a8(
    x_ptr,  # codes [M, K], or with USE_TMA their descriptor
    packed_ptr,  # [N/64, K/BK, 64, BK/2]
    input_scales_ptr,  # [M]
    scales_ptr,  # [N/64, G, 64]; without groups [N]
    bias_ptr,  # [N] or None
    y_ptr,  # [M, N]
    partials_ptr,  # [SPLIT, M, N]
    counters_ptr,  # zero, one for each tile
    M,
    N,
    K,
    STEPS_PER_GROUP: tl.constexpr,  # 0: one scale per output, no groups
    FACTOR: tl.constexpr,  # factor by which codes exceed their values in the product
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TILE_N: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    INTEGERS: tl.constexpr,
    USE_TMA: tl.constexpr,
    PDL: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    SUM: tl.constexpr = partials_ptr.dtype.element_ty
    PRODUCT: tl.constexpr = tl.int32 if INTEGERS else tl.float32
    tile_n, split, tile_m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m = tile_m * BM + tl.arange(0, BM)
    n = tile_n * BN + tl.arange(0, BN)
    steps = K // BK
    first = split * steps // SPLIT
    last = (split + 1) * steps // SPLIT
    # the second half of a tile of 128 outputs may be beyond the stored tiles: repeat the last one
    stored_tile = tl.minimum(n // TILE_N, tl.cdiv(N, TILE_N) - 1)
    stored_row = n % TILE_N
    packed_row = ((stored_tile * steps + first).to(tl.int64) * TILE_N + stored_row) * (BK // 2)
    packed_ptrs = packed_ptr + packed_row[:, None] + tl.arange(0, BK // 2)[None, :]
    if not USE_TMA:
        k = first * BK + tl.arange(0, BK)
        x_ptrs = x_ptr + m.to(tl.int64)[None, :] * K + k[:, None]
    if STEPS_PER_GROUP > 0:
        groups = steps // STEPS_PER_GROUP
        scale_ptrs = scales_ptr + stored_tile * groups * TILE_N + stored_row
    if PDL:
        # weights never change; the previous kernel may use x and the workspace until it has ended
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BN, BM), SUM)
    for step in tl.range(first, last, num_stages=STAGES):
        if USE_TMA:
            x = x_ptr.load([tile_m * BM, step * BK]).T  # [BK, BM]
        else:
            zero = tl.zeros((), tl.float32).to(x_ptr.dtype.element_ty)
            x = tl.load(x_ptrs, mask=m[None, :] < M, other=zero)
            x_ptrs += BK
        packed = tl.load(packed_ptrs, eviction_policy="evict_first")
        packed_ptrs += TILE_N * (BK // 2)
        weights = expanded_weights(packed, INTEGERS, BN, BK, USE_PTX)
        if INTEGERS and STEPS_PER_GROUP == 0:
            total = tl.dot(weights, x, total, out_dtype=tl.int32)
        else:
            # the tensor core keeps 14 bits of a float8 sum: add it in float32 after each step
            product = tl.dot(weights, x, out_dtype=PRODUCT).to(tl.float32)
            if STEPS_PER_GROUP > 0:
                scale = tl.load(scale_ptrs + step // STEPS_PER_GROUP * TILE_N).to(tl.float32)
                total = tl.fma(product, tl.broadcast_to((scale / FACTOR)[:, None], BN, BM), total)
            else:
                total += product
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if SPLIT == 1:
        _store_scaled(
            total, input_scales_ptr, scales_ptr, bias_ptr, y_ptr, m, n, M, N, STEPS_PER_GROUP == 0
        )
    else:
        mask = (m[None, :] < M) & (n[:, None] < N)
        ptrs = partials_ptr + m[None, :] * N + n[:, None]
        counter_ptr = counters_ptr + tile_m * tl.num_programs(0) + tile_n
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
                STEPS_PER_GROUP == 0,
            )
            tl.store(counter_ptr, 0)
