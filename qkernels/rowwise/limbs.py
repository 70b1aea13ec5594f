"""16-bit inputs to int8 limbs for the integer tensor core, in Triton.

Legend: M rows, K inputs; BLOCK steps of 128 inputs.
"""

import torch
import triton
import triton.language as tl

from qkernels.gpu.config import ceil_div
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl import pdl_launch_and_wait, pdl_options
from qkernels.operands.limbs import K_STEP, LimbForm, Limbs, empty_limbs
from qkernels.operands.limbs_triton import load_steps, store_limbs

STEPS_OF_BLOCK = 2


def to_limbs(x_MK: torch.Tensor, form: LimbForm) -> Limbs:
    """As ops.to_limbs."""
    return limbs_by_steps(_to_limbs, x_MK.contiguous(), x_MK.shape[1], form)


def limbs_by_steps(kernel, x: torch.Tensor, K: int, form: LimbForm, **constants: bool) -> Limbs:
    """Limbs of K inputs of each row of x, by a kernel that does some steps of a row in a block."""
    M, steps = x.shape[0], K // K_STEP
    limbs = empty_limbs(form, M, K, x.device)
    with on_device(x):
        launch(
            kernel,
            (ceil_div(steps, STEPS_OF_BLOCK), M),
            x,
            limbs.words,
            limbs.scales,
            limbs.sums,
            M,
            steps,
            **constants,
            FORM=form,
            BLOCK=STEPS_OF_BLOCK,
            num_warps=1,
            **pdl_options(x, M),
        )
    return limbs


@triton.jit(do_not_specialize=["M"])
def _to_limbs(
    x_ptr,  # [M, K]
    words_ptr,
    scales_ptr,
    sums_ptr,
    M,
    steps,
    FORM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK steps of one row."""
    m, first = tl.program_id(1), tl.program_id(0) * BLOCK
    if PDL:
        pdl_launch_and_wait()
    values = load_steps(x_ptr + m.to(tl.int64) * steps * 128, first, steps, BLOCK, FORM)
    store_limbs(values, words_ptr, scales_ptr, sums_ptr, m, first, M, steps, FORM)
