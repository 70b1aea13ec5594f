"""16-bit inputs to int8 limbs for the integer tensor core, in Triton.

Legend: M rows, K inputs; BLOCK steps of 128 inputs.
"""

import torch
import triton
import triton.language as tl

from qkernels.gpu.config import ceil_div
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl import early, start_early
from qkernels.operands.limbs import LINEAR_MAX_BLOCK_K, DigitForm, Digits, empty_digits
from qkernels.operands.limbs_triton import load_steps, store_digits

STEPS_OF_BLOCK = 2


def input_digits(x_MK: torch.Tensor, form: DigitForm) -> Digits:
    """As ops.input_digits."""
    return digits_by_steps(_input_digits, x_MK.contiguous(), x_MK.shape[1], form)


def digits_by_steps(kernel, x: torch.Tensor, K: int, form: DigitForm) -> Digits:
    """Digits of K inputs of each row of x, by a kernel that does some steps of a row in a block."""
    M, steps = x.shape[0], K // LINEAR_MAX_BLOCK_K
    digits = empty_digits(form, M, K, x.device)
    with on_device(x):
        launch(
            kernel,
            (ceil_div(steps, STEPS_OF_BLOCK), M),
            x,
            digits.words,
            digits.scales,
            digits.sums,
            M,
            steps,
            FORM=form,
            BLOCK=STEPS_OF_BLOCK,
            num_warps=1,
            **early(x, M),
        )
    return digits


@triton.jit(do_not_specialize=["M"])
def _input_digits(
    x_ptr,  # [M, K]
    words_ptr,
    scales_ptr,
    sums_ptr,
    M,
    steps,
    FORM: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BLOCK steps of one row."""
    m, first = tl.program_id(1), tl.program_id(0) * BLOCK
    if EARLY:
        start_early()
    values = load_steps(x_ptr + m.to(tl.int64) * steps * 128, first, steps, BLOCK, FORM)
    store_digits(values, words_ptr, scales_ptr, sums_ptr, m, first, M, steps, FORM)
