"""Gluon's functions under one name each: triton 3.6 and 3.9 call them differently. Knows no kernel.

Importing it needs a triton that has Gluon.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from qkernels.gpu.tma import describe

DTYPES = {
    torch.int8: gl.int8,
    torch.int32: gl.int32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
}

_RENAMED = gl.constexpr(hasattr(tma, "async_load"))

# a box between memory and shared memory, by the copy engine
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

# elements at pointers into shared memory
load_elements = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

# of a block's warps, or of a partition's
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def reshaped(memory, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory with another shape and layout."""
    if _RENAMED:
        return memory.reinterpret(memory.dtype, shape, layout)
    else:
        return memory._reinterpret(memory.dtype, shape, layout)


@gluon.jit
def retyped(memory, dtype: gl.constexpr, layout: gl.constexpr):
    """The same shared memory with elements of another type, as wide."""
    if _RENAMED:
        return memory.reinterpret(dtype, memory.shape, layout)
    else:
        return memory._reinterpret(dtype, memory.shape, layout)


def descriptor(tensor: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """What the copy engine needs to copy boxes of `block` of a matrix."""
    return describe(_descriptor, tensor, tuple(block))


def _descriptor(base, shape, strides, block) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[base.dtype])
    return TensorDescriptor(base, shape, strides, block, layout)
