"""Norm or activation, and the rounding of its result to 8 bits, in one Triton kernel for each row.

What the two operations in turn compute (norm_act.py, quantize.py), without the trip through
memory between them. Legend: M rows, C channels, I intermediate size.
"""

import torch
import triton
import triton.language as tl

from formats.activation import MIN_INPUT_SCALE
from formats.scheme import ActivationSpec
from qkernels.gpu.config import power_of_two
from qkernels.gpu.device import INTERPRETED, sm_count
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl import pdl_launch_and_wait
from qkernels.operands.codes import CODE_DTYPES
from qkernels.operands.codes_triton import CODE_RANGE, encode, scale_of_chunks
from qkernels.operands.split_k import LinearOutput
from qkernels.operands.split_k_triton import contiguous, load_reduced, partials_source, reduce_warps
from qkernels.rowwise.branch import PLAIN, Branch
from qkernels.rowwise.branch_triton import changed_branch, gelu_argument
from qkernels.rowwise.quantize import NO_PDL, dependent_launch, row_chunks, row_warps


def rms_norm_quantize(
    x_MC: torch.Tensor,
    weight_C: torch.Tensor,
    eps: float,
    activation: ActivationSpec,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ops.rms_norm_quantize."""
    codes_MC, scales_M1, _ = _norm(x_MC, None, weight_C, eps, activation, scale)
    return codes_MC, scales_M1


def add_rms_norm_quantize(
    x_MC: LinearOutput,
    residual_MC: torch.Tensor,
    weight_C: torch.Tensor | None,
    eps: float,
    activation: ActivationSpec,
    scale: torch.Tensor | None = None,
    branch: Branch = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ops.add_rms_norm_quantize."""
    return _norm(x_MC, residual_MC.contiguous(), weight_C, eps, activation, scale, branch)


def _norm(
    x_MC: LinearOutput,
    residual_MC: torch.Tensor | None,
    weight_C: torch.Tensor | None,
    eps: float,
    activation: ActivationSpec,
    scale: torch.Tensor | None,
    branch: Branch = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    M, C = x_MC.shape
    source, stride_part, format = partials_source(contiguous(x_MC))
    codes_MC, scales_M1 = _empty_codes(M, C, activation, x_MC.device)
    total_MC = None if residual_MC is None else torch.empty_like(residual_MC)
    if M:
        block = power_of_two(C)
        with on_device(source):
            launch(
                _rms_norm_quantize,
                (M,),
                source,
                stride_part,
                residual_MC,
                weight_C,
                branch.norm_C,
                total_MC,
                None if activation.dynamic else scale,
                codes_MC,
                scales_M1,
                C,
                eps,
                **branch.launch_constants(),
                BLOCK=block,
                num_warps=reduce_warps(block) if format.parts else row_warps(block),
                SUM=format,
                **_rounding(activation),
                **dependent_launch(M, C, x_MC.device),
            )
    return codes_MC, scales_M1, total_MC


def silu_and_mul_quantize(
    x_M2I: torch.Tensor, activation: ActivationSpec, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ops.silu_and_mul_quantize."""
    return _act_and_mul_quantize(x_M2I, activation, scale, gelu=False)


def gelu_and_mul_quantize(
    x_M2I: torch.Tensor, activation: ActivationSpec, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ops.gelu_and_mul_quantize."""
    return _act_and_mul_quantize(x_M2I, activation, scale, gelu=True)


def _act_and_mul_quantize(
    x_M2I: torch.Tensor, activation: ActivationSpec, scale: torch.Tensor | None, *, gelu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    M, width = x_M2I.shape[0], x_M2I.shape[1] // 2
    x_M2I = x_M2I.contiguous()
    codes_MI, scales_M1 = _empty_codes(M, width, activation, x_M2I.device)
    if M:
        chunk, chunks, warps = row_chunks(width, x_M2I.element_size())
        bounded = x_M2I.element_size() == 2 and chunks < 8 and width % 16 == 0
        # us of 4096 rows of 14336: three blocks on an SM 70.7, two 77; with dependent launch 72.1.
        # Of 256 rows: two on an SM 6.2; three, with one beside waiting blocks elsewhere, 7.5
        many = 2 * sm_count(x_M2I.device) < M
        pdl = NO_PDL if many else dependent_launch(M, width, x_M2I.device)
        with on_device(x_M2I):
            launch(
                _silu_and_mul_quantize,
                (M,),
                x_M2I,
                None if activation.dynamic else scale,
                codes_MI,
                scales_M1,
                width,
                CHUNK=chunk,
                CHUNKS=chunks,
                GELU=gelu,
                num_warps=warps,
                maxnreg=(80 if many else 96) if bounded else None,
                **_rounding(activation),
                **pdl,
            )
    return codes_MI, scales_M1


def _empty_codes(
    M: int, C: int, activation: ActivationSpec, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    codes_MC = torch.empty((M, C), dtype=CODE_DTYPES[activation.type], device=device)
    return codes_MC, torch.empty((M, 1), dtype=torch.float32, device=device)


def _rounding(activation: ActivationSpec) -> dict[str, object]:
    """The constants of a launch that say how to round."""
    smallest, largest = CODE_RANGE[CODE_DTYPES[activation.type]]
    return {
        "SMALLEST": smallest,
        "LARGEST": largest,
        "MIN_SCALE": MIN_INPUT_SCALE,
        "INTERPRETED": INTERPRETED,
    }


@triton.jit
def _rms_norm_quantize(
    x_ptr,  # [M, C], or parts of it (split_k_triton.py)
    stride_part,
    residual_ptr,  # [M, C] or None
    weight_ptr,  # [C] or None: the sum alone
    branch_ptr,  # [C] or None
    total_ptr,  # [M, C] or None
    scale_ptr,  # [] or None: dynamic
    codes_ptr,  # [M, C]
    scales_ptr,  # [M]
    C,
    eps,
    BRANCH_EPS: tl.constexpr,
    BRANCH_FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    SUM: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    PDL: tl.constexpr,
    LAUNCH_FIRST: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    DTYPE: tl.constexpr = SUM.dtype
    place = tl.program_id(0).to(tl.int64)
    row = place * C
    c = tl.arange(0, BLOCK)
    mask = c < C
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + c, mask=mask, other=0.0).to(tl.float32)
    branch = None
    if branch_ptr is not None:
        branch = tl.load(branch_ptr + c, mask=mask, other=0.0)
    if PDL:
        pdl_launch_and_wait(LAUNCH_FIRST)
    x = load_reduced(x_ptr + row + c, mask, stride_part, SUM).to(tl.float32)
    if residual_ptr is not None:
        x = changed_branch(x, branch, C, BRANCH_EPS, BRANCH_FACTOR, DTYPE)
        x += tl.load(residual_ptr + row + c, mask=mask, other=0.0).to(tl.float32)
        # the model's residual stream is in DTYPE, and the norm sees it rounded
        rounded = x.to(DTYPE)
        tl.store(total_ptr + row + c, rounded, mask=mask)
        x = rounded.to(tl.float32)
    if weight_ptr is None:
        y = x.to(DTYPE)
    else:
        normed = x * tl.rsqrt(tl.sum(x * x, 0) / C + eps)
        if weight_ptr.dtype.element_ty != tl.float32:  # else the product alone is rounded
            normed = normed.to(DTYPE).to(tl.float32)
        y = (weight * normed).to(DTYPE)
    DYNAMIC: tl.constexpr = scale_ptr is None
    scale = scale_of_chunks((y,), LARGEST, MIN_SCALE) if DYNAMIC else tl.load(scale_ptr)
    codes = encode(y, scale, SMALLEST, LARGEST, codes_ptr.dtype.element_ty, DYNAMIC, INTERPRETED)
    tl.store(codes_ptr + row + c, codes, mask=mask)
    tl.store(scales_ptr + place, scale)


@triton.jit
def _over_sigmoid(x, z, INTERPRETED: tl.constexpr):
    """x / (1 + exp(-z)) in float32, in 5 instructions and not 20: no overflow to handle here."""
    if INTERPRETED:
        return x / (1 + tl.exp(-z))
    power = tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [z * -1.4426950408889634], tl.float32, True, 1
    )
    inverse = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [power + 1], tl.float32, True, 1
    )
    return x * inverse


@triton.jit
def _silu_and_mul_quantize(
    x_ptr,  # [M, 2 I]
    scale_ptr,  # [] or None: dynamic
    codes_ptr,  # [M, I]
    scales_ptr,  # [M]
    I,  # noqa: E741  the legend's name
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    GELU: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    PDL: tl.constexpr,
    LAUNCH_FIRST: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    DYNAMIC: tl.constexpr = scale_ptr is None
    place = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNK)
    if PDL:
        pdl_launch_and_wait(LAUNCH_FIRST)
    # the loads of all chunks are under way before the first is used
    gates = ()
    ups = ()
    for i in tl.static_range(CHUNKS):
        ptrs = x_ptr + place * 2 * I + i * CHUNK + c
        mask = i * CHUNK + c < I
        gates = gates + (tl.load(ptrs, mask=mask, other=0.0),)
        ups = ups + (tl.load(ptrs + I, mask=mask, other=0.0),)
    ys = ()
    for i in tl.static_range(CHUNKS):
        gate = gates[i].to(tl.float32)
        argument = gelu_argument(gate) if GELU else gate
        activated = _over_sigmoid(gate, argument, INTERPRETED).to(DTYPE).to(tl.float32)
        ys = ys + ((activated * ups[i].to(tl.float32)).to(DTYPE),)
    scale = scale_of_chunks(ys, LARGEST, MIN_SCALE) if DYNAMIC else tl.load(scale_ptr)
    CODE: tl.constexpr = codes_ptr.dtype.element_ty
    for i in tl.static_range(CHUNKS):
        codes = encode(ys[i], scale, SMALLEST, LARGEST, CODE, DYNAMIC, INTERPRETED)
        tl.store(codes_ptr + place * I + i * CHUNK + c, codes, mask=i * CHUNK + c < I)
    tl.store(scales_ptr + place, scale)
