"""Embeddings and states, each normed, side by side: what a draft head reads, in one Triton kernel.

Each value is rounded where rms_norm rounds it (norm_act.py), and limbs are those of to_limbs.
Legend: M rows, V tokens of the table, C channels.
"""

import torch
import triton
import triton.language as tl

from qkernels.gpu.config import power_of_two
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl import pdl_launch_and_wait, pdl_options
from qkernels.operands.limbs import K_STEP, LimbForm, Limbs, empty_limbs
from qkernels.operands.limbs_triton import load_steps, store_limbs, store_steps
from qkernels.rowwise.branch_triton import weighted
from qkernels.rowwise.limbs import to_limbs
from qkernels.rowwise.norm_act_limbs import MOST_CHANNELS, NORM_STEPS

HALVES = 2


def embed_norms(
    tokens_M: torch.Tensor,
    table_VC: torch.Tensor,
    table_norm_C: torch.Tensor,
    state_MC: torch.Tensor,
    state_norm_C: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ops.embed_norms."""
    M, C = state_MC.shape
    state_MC = state_MC.contiguous()
    out = state_MC.new_empty(M, HALVES * C)
    block = power_of_two(C)
    if M:
        with on_device(out):
            launch(
                _embed_norms,
                (M, HALVES),
                tokens_M,
                table_VC,
                table_norm_C,
                state_MC,
                state_norm_C,
                out,
                C,
                eps,
                BLOCK=block,
                num_warps=min(8, max(1, block // 256)),
                **pdl_options(out, M),
            )
    return out, out[:, C:]


@triton.jit
def _embed_norms(
    tokens_ptr,  # [M]
    table_ptr,  # [V, C]
    table_norm_ptr,  # [C]
    state_ptr,  # [M, C]
    state_norm_ptr,  # [C]
    out_ptr,  # [M, 2 C]
    C,
    eps,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One half of one row."""
    DTYPE: tl.constexpr = state_ptr.dtype.element_ty
    m, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.arange(0, BLOCK)
    inside = c < C
    norm_ptr = table_norm_ptr if half == 0 else state_norm_ptr
    weight = tl.load(norm_ptr + c, mask=inside, other=0.0)
    if PDL:
        # after the weight, which never changes; the others are the previous kernels' until they end
        pdl_launch_and_wait()
    row_ptr = table_ptr + tl.load(tokens_ptr + m) * C if half == 0 else state_ptr + m * C
    x = tl.load(row_ptr + c, mask=inside, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / C + eps)
    out = weighted(normed, weight, DTYPE)
    tl.store(out_ptr + (m * 2 + half) * C + c, out, mask=inside)


def embed_norms_limbs(
    tokens_M: torch.Tensor,
    table_VC: torch.Tensor,
    table_norm_C: torch.Tensor,
    state_MC: torch.Tensor,
    state_norm_C: torch.Tensor,
    eps: float,
    form: LimbForm,
) -> tuple[Limbs, torch.Tensor]:
    """As ops.embed_norms_limbs."""
    M, C = state_MC.shape
    if C > MOST_CHANNELS or form.with_tensor:
        out, normed_MC = embed_norms(tokens_M, table_VC, table_norm_C, state_MC, state_norm_C, eps)
        return to_limbs(out, form), normed_MC
    state_MC = state_MC.contiguous()
    steps = C // K_STEP
    # no block has steps of both halves
    block = min(NORM_STEPS, steps & -steps)
    limbs = empty_limbs(form, M, HALVES * C, state_MC.device)
    normed_MC = torch.empty_like(state_MC)
    with on_device(state_MC):
        launch(
            _embed_norms_limbs,
            (M, HALVES * steps // block),
            tokens_M,
            table_VC,
            table_norm_C,
            state_MC,
            state_norm_C,
            normed_MC,
            limbs.words,
            limbs.scales,
            limbs.sums,
            M,
            steps,
            eps,
            FORM=form,
            WHOLE=power_of_two(C),
            BLOCK=block,
            num_warps=8,
            **pdl_options(state_MC, M),
        )
    return limbs, normed_MC


@triton.jit(do_not_specialize=["M"])
def _embed_norms_limbs(
    tokens_ptr,  # [M]
    table_ptr,  # [V, C]
    table_norm_ptr,  # [C]
    state_ptr,  # [M, C]
    state_norm_ptr,  # [C]
    normed_ptr,  # [M, C]: of the states
    words_ptr,
    scales_ptr,
    sums_ptr,
    M,
    steps,  # of a half
    eps,
    FORM: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The sum of half a row, and limbs of BLOCK steps of it."""
    DTYPE: tl.constexpr = state_ptr.dtype.element_ty
    m, place = tl.program_id(0), tl.program_id(1) * BLOCK
    is_state = place >= steps
    first = place - steps if is_state else place
    c = tl.arange(0, WHOLE)
    norm_ptr = state_norm_ptr if is_state else table_norm_ptr
    weight = load_steps(norm_ptr, first, steps, BLOCK, FORM).to(tl.float32)
    if PDL:
        pdl_launch_and_wait()
    row = m.to(tl.int64)
    row_ptr = state_ptr + row * steps * 128
    if not is_state:
        row_ptr = table_ptr + tl.load(tokens_ptr + row) * steps * 128
    x = tl.load(row_ptr + c, mask=c < steps * 128, other=0.0).to(tl.float32)
    own = load_steps(row_ptr, first, steps, BLOCK, FORM).to(tl.float32)
    normed = own * tl.rsqrt(tl.sum(x * x, 0) / (steps * 128) + eps)
    if state_norm_ptr.dtype.element_ty != tl.float32:  # else the product alone is rounded
        normed = normed.to(DTYPE).to(tl.float32)
    y = (weight * normed).to(DTYPE)
    if is_state:
        store_steps(normed_ptr + row * steps * 128, y, first, steps, FORM)
    store_limbs(y, words_ptr, scales_ptr, sums_ptr, m, place, M, 2 * steps, FORM)
