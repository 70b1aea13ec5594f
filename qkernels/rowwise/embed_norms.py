"""Normalized embeddings and states, concatenated as a draft head reads them, in one Triton kernel.

Values are rounded as in an RMS norm (norm.py), and limbs equal those of to_limbs. Legend: M rows, V
tokens of the table, C channels.
"""

import torch
import triton
import triton.language as tl

from qkernels.gpu.config import power_of_two
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl import pdl_launch_and_wait, pdl_options
from qkernels.operands.limbs import K_STEP, LimbForm, Limbs, empty_limbs
from qkernels.operands.limbs_triton import load_steps, store_limbs, store_steps
from qkernels.rowwise.arithmetic_triton import normalized, row_statistics
from qkernels.rowwise.limbs import to_limbs
from qkernels.rowwise.norm import MAX_CHANNELS, NORM_STEPS

HALVES = 2


def embed_norms(
    tokens_M: torch.Tensor,
    table_VC: torch.Tensor,
    table_norm_C: torch.Tensor,
    state_MC: torch.Tensor,
    state_norm_C: torch.Tensor,
    eps: float,
    out: LimbForm | None = None,
) -> tuple[torch.Tensor | Limbs, torch.Tensor]:
    """Implement ops.embed_norms in Triton."""
    inputs = tokens_M, table_VC, table_norm_C, state_MC.contiguous(), state_norm_C
    M, C = state_MC.shape
    if out is not None:
        if C <= MAX_CHANNELS and not out.with_tensor:
            return _embed_norms_to_limbs(*inputs, eps, out)
        both_M2C, normed_MC = embed_norms(*inputs, eps)
        return to_limbs(both_M2C, out), normed_MC
    both_M2C = state_MC.new_empty(M, HALVES * C)
    block = power_of_two(C)
    if M:
        with on_device(both_M2C):
            launch(
                _embed_norms,
                (M, HALVES),
                *inputs,
                both_M2C,
                C,
                eps,
                BLOCK=block,
                num_warps=min(8, max(1, block // 256)),
                **pdl_options(both_M2C, M),
            )
    return both_M2C, both_M2C[:, C:]


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
    """Normalize one half of one row."""
    DTYPE: tl.constexpr = state_ptr.dtype.element_ty
    m, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.arange(0, BLOCK)
    inside = c < C
    norm_ptr = table_norm_ptr if half == 0 else state_norm_ptr
    weight = tl.load(norm_ptr + c, mask=inside, other=0.0)
    if PDL:
        # weights are loaded before the wait; previous kernels may still write the other inputs
        pdl_launch_and_wait()
    row_ptr = table_ptr + tl.load(tokens_ptr + m) * C if half == 0 else state_ptr + m * C
    x = tl.load(row_ptr + c, mask=inside, other=0.0).to(tl.float32)
    mean, inverse = row_statistics(x, inside, C, eps, "rms")
    out = normalized(x, mean, inverse, weight, None, "rms", DTYPE)
    tl.store(out_ptr + (m * 2 + half) * C + c, out, mask=inside)


def _embed_norms_to_limbs(
    tokens_M: torch.Tensor,
    table_VC: torch.Tensor,
    table_norm_C: torch.Tensor,
    state_MC: torch.Tensor,
    state_norm_C: torch.Tensor,
    eps: float,
    form: LimbForm,
) -> tuple[Limbs, torch.Tensor]:
    M, C = state_MC.shape
    steps = C // K_STEP
    # a power of two that divides `steps`, so that no block spans both halves
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
    normed_ptr,  # [M, C]: norm of the states
    words_ptr,
    scales_ptr,
    sums_ptr,
    M,
    steps,  # steps of a half
    eps,
    FORM: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the statistics of half a row and make limbs of BLOCK of its steps."""
    DTYPE: tl.constexpr = state_ptr.dtype.element_ty
    m, place = tl.program_id(0), tl.program_id(1) * BLOCK
    is_state = place >= steps
    first = place - steps if is_state else place
    c = tl.arange(0, WHOLE)
    norm_ptr = state_norm_ptr if is_state else table_norm_ptr
    weight = load_steps(norm_ptr, first, steps, BLOCK, FORM)
    if PDL:
        pdl_launch_and_wait()
    row = m.to(tl.int64)
    row_ptr = state_ptr + row * steps * 128
    if not is_state:
        row_ptr = table_ptr + tl.load(tokens_ptr + row) * steps * 128
    C = steps * 128
    x = tl.load(row_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    own = load_steps(row_ptr, first, steps, BLOCK, FORM).to(tl.float32)
    mean, inverse = row_statistics(x, c < C, C, eps, "rms")
    y = normalized(own, mean, inverse, weight, None, "rms", DTYPE)
    if is_state:
        store_steps(normed_ptr + row * steps * 128, y, first, steps, FORM)
    store_limbs(y, words_ptr, scales_ptr, sums_ptr, m, place, M, 2 * steps, FORM)
