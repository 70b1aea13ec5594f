"""TMA descriptors, checked once for all tensors of one shape.

Triton checks each descriptor that is made, which takes 10 to 20 us of Python.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

# (anything with a dtype and data_ptr(), shape, strides, block) -> a Triton descriptor
Make = Callable[[Any, tuple[int, ...], tuple[int, ...], list[int]], Any]

TMA_ALIGNMENT = 16  # bytes, of every address


def describe(make: Make, tensor: torch.Tensor, block: tuple[int, ...]) -> Any:
    """make(tensor, shape, strides, block), called and checked once for each dtype and shape.

    Raises AssertionError where TMA cannot address the tensor. All descriptors that the same
    compiled kernel takes have the same object as `kind`.
    """
    assert tensor.data_ptr() % TMA_ALIGNMENT == 0, "TMA takes addresses divisible by 16"
    like = _template(make, tensor.dtype, tensor.shape, tensor.stride(), block)
    found = object.__new__(type(like))
    found.__dict__.update(like.__dict__)
    found.base = tensor
    return found


class _Base:
    """Placeholder for a tensor: its dtype, at an address that passes Triton's checks."""

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
    """x, or a copy of it at an address that TMA takes."""
    return x.clone() if x.data_ptr() % TMA_ALIGNMENT else x
