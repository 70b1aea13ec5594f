"""TMA descriptors that are checked once for all tensors of one shape.

Triton checks every descriptor that it makes, which takes 10 to 20 us of host time.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

# (anything with a dtype and data_ptr(), shape, strides, block) -> a Triton descriptor
Make = Callable[[Any, tuple[int, ...], tuple[int, ...], list[int]], Any]

TMA_ALIGNMENT = 16  # bytes; every address and stride must be divisible by it


def describe(make: Make, tensor: torch.Tensor, block: tuple[int, ...]) -> Any:
    """Return make(tensor, shape, strides, block), called and checked once for each dtype and shape.

    Raises AssertionError if TMA cannot address the tensor. Descriptors that one compiled kernel can
    take share the same object as `kind`.
    """
    assert tensor.data_ptr() % TMA_ALIGNMENT == 0, "TMA takes addresses divisible by 16"
    like = _template(make, tensor.dtype, tensor.shape, tensor.stride(), block)
    found = object.__new__(type(like))
    found.__dict__.update(like.__dict__)
    found.base = tensor
    return found


class _Base:
    """Placeholder for a tensor: a dtype, and an address that passes Triton's checks."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def data_ptr(self) -> int:
        return 0


@functools.lru_cache(maxsize=4096)
def _template(make: Make, dtype: torch.dtype, shape, strides, block) -> Any:
    template = make(_Base(dtype), shape, strides, list(block))
    template.kind = _kind(make, dtype, block)
    return template


@functools.cache
def _kind(make: Make, dtype: torch.dtype, block: tuple[int, ...]) -> object:
    return object()


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy of x at an address that TMA accepts."""
    return x.clone() if x.data_ptr() % TMA_ALIGNMENT else x
