"""Dispatch table of latent attention."""

from qkernels.choice import FIXED_ORDER
from qkernels.dispatch import Kernel, Operation, reference, triton_or_reference
from qkernels.operands.codes import CODE_DTYPES
from qkernels.problem import Problem, fixed_order, needs_triton_on_gpu, refuses_pages

MAX_ENTRY = 640  # two steps of wider entries do not fit into shared memory on every GPU


def triton_latents(problem: Problem) -> str | None:
    reason = needs_triton_on_gpu(problem)
    if reason is None and problem.head_dim > MAX_ENTRY:
        return f"takes entries of up to {MAX_ENTRY}, not {problem.head_dim}"
    if reason is None and problem.pages_dtype in CODE_DTYPES.values() and not problem.tma_pages:
        return "takes 8-bit pages only if entries and latents have a multiple of 16 numbers"
    return reason or refuses_pages(problem)


def in_fixed_order(problem: Problem) -> str | None:
    return fixed_order(problem, triton_latents)


LATENT_ATTENTION = Operation(
    "latent_attention",
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
