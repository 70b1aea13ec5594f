"""What a row of dispatch.py is asked to support, and what all rows ask first."""

import functools
import importlib.util
import os
from dataclasses import dataclass

import torch

from formats.scheme import ActivationSpec, QuantSpec

HALF_DTYPES = (torch.float16, torch.bfloat16)
FLOAT_DTYPES = (*HALF_DTYPES, torch.float32)
QUANTIZE_MAX_INPUTS = 2**15  # 32 for each thread of the largest block; 64 spill


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a row is asked to support. An operation reads the fields that it has."""

    device: str  # "cuda" or "cpu"
    dtype: torch.dtype  # of the activations
    requested: str | None = None  # the kernel that the caller asked for by name
    spec: QuantSpec | None = None
    activation: ActivationSpec | None = None
    out_features: int = 0
    in_features: int = 0
    head_dim: int = 0
    page_size: int = 0
    pages_dtype: torch.dtype | None = None  # of keys and values; None: the activations'
    soft_cap: bool = False  # scores are bent into a range
    sinks: bool = False  # each head gives some of its weight to no key
    chunk: bool = False  # more query rows than a decode step has
    tma_pages: bool = True  # TMA takes their address and strides
    alike: str | None = None  # why weights, of experts, cannot stand in one; None: they can


@functools.cache
def has_triton() -> bool:
    """Whether triton is installed; it is not imported."""
    return importlib.util.find_spec("triton") is not None


def needs_triton(problem: Problem) -> str | None:
    """Why no Triton kernel can run here; None: one can."""
    if not has_triton():
        return "triton is not installed"
    # TRITON_INTERPRET is triton's own switch: the same kernel then runs on a CPU, very slowly
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and problem.requested is not None
    if problem.device != "cuda" and not interpreted:
        return f"runs on cuda, not on {problem.device}"
    return None


def needs_triton_on_gpu(problem: Problem) -> str | None:
    """As needs_triton, of a kernel that takes any float dtype."""
    reason = needs_triton(problem)
    if reason is None and problem.dtype not in FLOAT_DTYPES:
        return f"takes float16, bfloat16 and float32, not {problem.dtype}"
    return reason


def refuses_activation(activation: ActivationSpec) -> str | None:
    """Why quantize.py cannot round so; None: it can."""
    if activation.per == "group" or (activation.dynamic and activation.per == "tensor"):
        return (
            f"rounds with a scale for each token or a static one, not one for each {activation.per}"
        )
    return None


@functools.cache
def has_float8_products() -> bool:
    """Whether the GPU multiplies float8 (sm_89 or later). True without one: `explain` asks, too."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)


def anything(problem: Problem) -> str | None:
    """Of a row that can do every problem."""
    return None
