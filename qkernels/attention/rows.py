"""Dispatch table of the attention operations."""

from dataclasses import replace

import torch

from qkernels.attention.cache import INT4_PAGES
from qkernels.attention.config import PREFILL_WIDE_KEYS
from qkernels.choice import FIXED_ORDER
from qkernels.dispatch import Kernel, Operation, reference, triton_or_reference
from qkernels.gpu import device as gpu_device
from qkernels.operands.codes import CODE_DTYPES
from qkernels.problem import (
    HALF_DTYPES,
    Problem,
    needs_triton,
    needs_triton_on_gpu,
    refuses_pages,
)

MAX_HEAD_DIM = 512
KV_WRITE_MAX_HEAD_DIM = 1024  # a program holds a head in registers


def triton_attention(problem: Problem) -> str | None:
    reason = needs_triton_on_gpu(problem)
    if reason is None and not 16 <= problem.head_dim <= MAX_HEAD_DIM:
        return f"takes heads of 16 to {MAX_HEAD_DIM}, not {problem.head_dim}"
    if reason is None and problem.page_size not in (16, 32, 64, 128):
        return f"takes pages of 16, 32, 64 or 128 tokens, not {problem.page_size}"
    return reason or refuses_pages(problem)


def triton_kv_write(problem: Problem) -> str | None:
    reason = needs_triton_on_gpu(problem)
    if reason is None and problem.head_dim > KV_WRITE_MAX_HEAD_DIM:
        return f"takes heads of up to {KV_WRITE_MAX_HEAD_DIM}, not {problem.head_dim}"
    return reason or refuses_pages(problem)


def sm90_prefill(problem: Problem) -> str | None:
    reason = needs_triton(problem) or gpu_device.lacks_arch(torch.device(problem.device), "sm_90")
    if reason is not None:
        return reason
    if not problem.chunk:
        return "made for the many rows of a prompt chunk"
    if problem.alibi:
        return "does not support ALiBi biases"
    if problem.chunked:
        return "does not support chunked attention"
    if problem.dtype not in HALF_DTYPES:
        return f"takes float16 and bfloat16, not {problem.dtype}"
    if problem.pages_dtype not in (None, problem.dtype, *CODE_DTYPES.values()):
        return f"takes pages of {problem.dtype}, int8 or float8, not {problem.pages_dtype}"
    if not 16 <= problem.head_dim <= 256 or problem.head_dim % 8:
        return f"takes heads of 16 to 256, divisible by 8, not {problem.head_dim}"
    if problem.head_dim > 128 and problem.pages_dtype in CODE_DTYPES.values():
        return f"takes heads of up to 128 over 8-bit pages, not {problem.head_dim}"
    if problem.page_size not in (16, 32, 64, 128):
        return f"takes pages of 16, 32, 64 or 128 tokens, not {problem.page_size}"
    if problem.head_dim > 128 and problem.page_size > PREFILL_WIDE_KEYS:
        return (
            f"takes pages of up to {PREFILL_WIDE_KEYS} tokens with heads of more than 128, not"
            f" {problem.page_size}"
        )
    if not problem.tma_pages:
        return "takes pages whose address and strides are multiples of 16 bytes"
    return None


def fixed_order(problem: Problem) -> str | None:
    if problem.requested != FIXED_ORDER:
        return "runs only if requested by name"
    if problem.pages_dtype == INT4_PAGES:
        return "does not support 4-bit pages"
    if problem.device == "cpu":
        return None
    on_sm90 = gpu_device.lacks_arch(torch.device(problem.device), "sm_90") is None
    if on_sm90 and problem.pages_dtype not in CODE_DTYPES.values():
        return sm90_prefill(replace(problem, chunk=True))
    return triton_attention(problem)


PAGED_ATTENTION = Operation(
    "paged_attention",
    Kernel(
        name="sm90_prefill",
        module="attention.sm90_prefill",
        priority=30,
        supports=sm90_prefill,
    ),
    Kernel(
        name="triton",
        module="attention.triton_paged",
        priority=20,
        supports=triton_attention,
    ),
    reference("attention"),
    Kernel(
        name=FIXED_ORDER,
        module="attention.fixed_order.paged",
        priority=5,
        supports=fixed_order,
    ),
)
APPLY_ROPE = triton_or_reference("attention", "apply_rope", "rope", needs_triton_on_gpu)
WRITE_KV = triton_or_reference("attention", "write_kv_", "rope_write_kv", triton_kv_write)
ROPE_WRITE_KV = triton_or_reference("attention", "rope_write_kv_", "rope_write_kv", triton_kv_write)
BLOCK_SCORES = triton_or_reference(
    "attention.selected", "block_scores", "triton_scores", needs_triton_on_gpu
)
OPERATIONS = (PAGED_ATTENTION, APPLY_ROPE, WRITE_KV, ROPE_WRITE_KV, BLOCK_SCORES)
