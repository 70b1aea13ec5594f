"""`Problem`, from which dispatch chooses a kernel, and support checks that many kernels share."""

import functools
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from formats.scheme import ActivationSpec, QuantSpec
from qkernels.choice import FIXED_ORDER

HALF_DTYPES = (torch.float16, torch.bfloat16)
FLOAT_DTYPES = (*HALF_DTYPES, torch.float32)
QUANTIZE_MAX_INPUTS = 2**15  # 32 for each thread of the largest block; 64 would spill


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Description of a call that a kernel must support. Each operation sets the fields it needs."""

    device: str  # "cuda" or "cpu"
    dtype: torch.dtype  # dtype of the activations
    requested: str | None = None  # kernel that the caller requested by name
    spec: QuantSpec | None = None
    activation: ActivationSpec | None = None
    form: Literal["tensor", "codes", "limbs"] = "tensor"  # output form of a row-wise operation
    out_features: int = 0
    in_features: int = 0
    head_dim: int = 0
    latent_width: int = 0  # numbers of an entry's latent, in latent attention
    page_size: int = 0
    pages_dtype: torch.dtype | None = None  # dtype of keys and values; None: same as `dtype`
    soft_cap: bool = False  # attention scores are softcapped
    sinks: bool = False  # attention sinks
    alibi: bool = False  # ALiBi biases of scores
    chunked: bool = False  # chunked attention: a row sees only keys of its own chunk of positions
    chunk: bool = False  # a prompt chunk: more query rows than a decode step has
    tma_pages: bool = True  # TMA supports the address and strides of the pages
    alike: str | None = None  # why the experts' weights cannot be stacked in one tensor; None: can
    gated: bool = True  # the experts have a gate projection
    gelu: bool = False  # the gate's activation is the tanh approximation of GELU
    cut_after: bool = False  # the result of the activation is clamped to a limit from above


@functools.cache
def has_triton() -> bool:
    """Return True if triton is installed, without importing it."""
    return importlib.util.find_spec("triton") is not None


def needs_triton(problem: Problem) -> str | None:
    """Return why no Triton kernel can run here; None: one can."""
    if not has_triton():
        return "triton is not installed"
    # TRITON_INTERPRET is Triton's own switch: it runs the same kernel on a CPU, very slowly
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and problem.requested is not None
    if problem.device != "cuda" and not interpreted:
        return f"runs on cuda, not on {problem.device}"
    return None


def needs_triton_on_gpu(problem: Problem) -> str | None:
    """Return why a Triton kernel for any float dtype cannot run on this GPU; None: it can."""
    reason = needs_triton(problem)
    if reason is None and problem.dtype not in FLOAT_DTYPES:
        return f"takes float16, bfloat16 and float32, not {problem.dtype}"
    return reason


def refuses_activation(activation: ActivationSpec) -> str | None:
    """Return why quantize.py cannot round activations with this spec; None: it can."""
    if activation.per == "group" or (activation.dynamic and activation.per == "tensor"):
        return (
            f"rounds with a scale for each token or a static one, not one for each {activation.per}"
        )
    return None


@functools.cache
def has_float8_products() -> bool:
    """Return True if the GPU multiplies float8 (sm_89 or later).

    Also True without a GPU, where only `explain` asks.
    """
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)


def fixed_order(problem: Problem, gpu: Callable[[Problem], str | None]) -> str | None:
    """Return why a fixed-order (batch-invariant) row does not run; None: it runs.

    `gpu` returns the reason on a GPU; a CPU supports every problem.
    """
    if problem.requested != FIXED_ORDER:
        return "runs only if requested by name"
    return None if problem.device == "cpu" else gpu(problem)


def anything(problem: Problem) -> str | None:
    """Return None: the row supports every problem."""
    return None


def refuses_pages(problem: Problem) -> str | None:
    """Return why the GPU cannot read or write pages of this dtype; None: it can."""
    if problem.pages_dtype == torch.float8_e4m3fn and problem.device == "cuda":
        return None if has_float8_products() else "float8 pages need an sm_89 GPU or later"
    return None
