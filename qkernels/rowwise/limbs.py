"""Conversion of 16-bit inputs to int8 limbs for integer tensor cores, in Triton.

Legend: M rows, K inputs; BLOCK steps of 128 inputs.
"""

from dataclasses import replace

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
    """Implement ops.to_limbs in Triton."""
    x_MK = x_MK.contiguous()
    limbs = empty_limbs(form, *x_MK.shape, x_MK.device)
    limbs_by_steps(_to_limbs, x_MK, limbs)
    return replace(limbs, tensor=x_MK) if form.with_tensor else limbs


def limbs_by_steps(kernel, x: torch.Tensor, limbs: Limbs, *tensors, **constants: object) -> None:
    """Launch a kernel that fills `limbs` from the rows of x.

    A block does STEPS_OF_BLOCK K steps of one row.
    """
    M, steps = limbs.num_rows, limbs.in_features // K_STEP
    with on_device(x):
        launch(
            kernel,
            (ceil_div(steps, STEPS_OF_BLOCK), M),
            x,
            limbs.words,
            limbs.scales,
            limbs.sums,
            *tensors,
            M,
            steps,
            **constants,
            FORM=limbs.form,
            BLOCK=STEPS_OF_BLOCK,
            num_warps=1,
            **pdl_options(x, M),
        )


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
    """Convert BLOCK steps of one row."""
    m, first = tl.program_id(1), tl.program_id(0) * BLOCK
    if PDL:
        pdl_launch_and_wait()
    values = load_steps(x_ptr + m.to(tl.int64) * steps * 128, first, steps, BLOCK, FORM)
    store_limbs(values, words_ptr, scales_ptr, sums_ptr, m, first, M, steps, FORM)
