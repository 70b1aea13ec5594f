"""Dispatch table of latent attention."""

import torch

from qkernels.choice import FIXED_ORDER
from qkernels.dispatch import Kernel, Operation, reference, triton_or_reference
from qkernels.gpu.device import lacks_arch
from qkernels.latent.config import USUAL_ENTRY
from qkernels.latent.sm90_decode_config import CHUNK_WIDTH, LATENT_WIDTHS, PAGE_SIZES
from qkernels.operands.codes import CODE_DTYPES
from qkernels.problem import (
    HALF_DTYPES,
    Problem,
    fixed_order,
    needs_triton,
    needs_triton_on_gpu,
    refuses_pages,
)

SM90_DECODE = "sm90_decode"
MAX_ENTRY = 1152  # registers hold sums of 16 rows of a latent


def triton_latents(problem: Problem) -> str | None:
    # two steps of wider entries in float32 do not fit into shared memory on every GPU
    most = MAX_ENTRY if problem.dtype in HALF_DTYPES else USUAL_ENTRY
    reason = needs_triton_on_gpu(problem)
    if reason is None and problem.head_dim > most:
        return f"takes entries of up to {most} in {problem.dtype}, not {problem.head_dim}"
    if reason is None and problem.pages_dtype in CODE_DTYPES.values() and not problem.tma_pages:
        return "takes 8-bit pages only if entries and latents have a multiple of 16 numbers"
    return reason or refuses_pages(problem)


def sm90_decode(problem: Problem) -> str | None:
    reason = needs_triton(problem) or lacks_arch(torch.device(problem.device), "sm_90")
    if reason is not None:
        return reason
    if problem.dtype not in HALF_DTYPES:
        return f"takes float16 and bfloat16, not {problem.dtype}"
    if problem.pages_dtype not in (None, problem.dtype):
        return f"takes pages of {problem.dtype}, not {problem.pages_dtype}"
    latent, rope = problem.latent_width, problem.head_dim - problem.latent_width
    if latent not in LATENT_WIDTHS or not 0 < rope <= CHUNK_WIDTH or rope % 8:
        widths = ", ".join(map(str, LATENT_WIDTHS))
        return (
            f"takes latents of {widths} numbers and keys of 8 to {CHUNK_WIDTH}, divisible by 8,"
            f" not {latent} and {rope}"
        )
    if problem.page_size not in PAGE_SIZES:
        sizes = ", ".join(map(str, PAGE_SIZES))
        return f"takes pages of {sizes} tokens, not {problem.page_size}"
    return None


def in_fixed_order(problem: Problem) -> str | None:
    if problem.head_dim > USUAL_ENTRY:
        return f"takes entries of up to {USUAL_ENTRY}, not {problem.head_dim}"
    return fixed_order(problem, triton_latents)


LATENT_ATTENTION = Operation(
    "latent_attention",
    Kernel(
        name=SM90_DECODE,
        module="latent.sm90_decode",
        priority=30,
        supports=sm90_decode,
    ),
    Kernel(
        name="triton",
        module="latent.triton_latent",
        priority=20,
        supports=triton_latents,
    ),
    reference("latent"),
    Kernel(
        name=FIXED_ORDER,
        module="latent.fixed_order.attention",
        priority=5,
        supports=in_fixed_order,
    ),
)
ROPE_WRITE_LATENTS = triton_or_reference(
    "latent", "rope_write_latents_", "triton_write", triton_latents
)
INDEX_SCORES = triton_or_reference(
    "latent.selected", "index_scores", "triton_scores", needs_triton_on_gpu
)
SELECTED_LATENT_ATTENTION = triton_or_reference(
    "latent.selected", "selected_latent_attention", "attention", triton_latents
)
OPERATIONS = (LATENT_ATTENTION, ROPE_WRITE_LATENTS, INDEX_SCORES, SELECTED_LATENT_ATTENTION)
