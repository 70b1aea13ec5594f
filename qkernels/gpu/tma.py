"""What the copy engine needs to know of a tensor, without checking twice. Knows no kernel.

Triton checks a descriptor whenever one is made, 10 to 20 us of Python for one like the last.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

# (anything with a dtype and data_ptr(), shape, strides, block) -> a descriptor of Triton's
Make = Callable[[Any, tuple[int, ...], tuple[int, ...], list[int]], Any]

TMA_ALIGNMENT = 16  # bytes, of every address


def describe(make: Make, tensor: torch.Tensor, block: tuple[int, ...]) -> Any:
    """make(tensor, its shape, its strides, block), called and checked once for all like it.

    Raises AssertionError where the copy engine cannot take the tensor. The `kind` of the result is
    one object for all descriptors that a kernel need not be compiled anew for.
    """
    assert tensor.data_ptr() % TMA_ALIGNMENT == 0, "the copy engine takes addresses divisible by 16"
    like = _template(make, tensor.dtype, tensor.shape, tensor.stride(), block)
    found = object.__new__(type(like))
    found.__dict__.update(like.__dict__)
    found.base = tensor
    return found


class _Base:
    """A tensor's dtype, at an address that every descriptor can have."""

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
    """x, or a copy of it at an address that TMA can read."""
    return x.clone() if x.data_ptr() % TMA_ALIGNMENT else x
