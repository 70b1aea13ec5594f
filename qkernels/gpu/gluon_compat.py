"""Gluon functions that triton 3.6 and 3.9 name differently, under one name, and `aggregate`.

Importing this module requires a version of Triton that has Gluon.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate, base_value

from qkernels.gpu.tma import describe

DTYPES = {
    torch.int8: gl.int8,
    torch.int16: gl.int16,
    torch.int32: gl.int32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
}

_RENAMED = gl.constexpr(hasattr(tma, "async_load"))

# TMA copies between global and shared memory
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

# cp.async: elements at pointers to shared memory
load_elements = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

# synchronizes the warps of a block, or of a warp-specialized partition
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

# type of a kernel's integer argument: an argument of 1 is compiled in as a constexpr
integer = gl.tensor | gl.constexpr

_make_aggregate = getattr(gluon, "aggregate", None) or _aggregate


def _init(self, **fields) -> None:
    for name, value in fields.items():
        setattr(self, name, value if isinstance(value, base_value) else gl.constexpr(value))


_init.__triton_builtin__ = True  # otherwise triton refuses to call a plain Python function


def aggregate(cls: type) -> type:
    """Make a class a struct of kernel values: tensors, descriptors, constexprs, other aggregates.

    The class annotates its fields, is built by keyword, and is immutable. Kernels can call its
    `gluon.jit` methods.
    """
    cls.__init__ = _init
    return _make_aggregate(cls)


@gluon.jit
def reshaped(memory, shape: gl.constexpr, layout: gl.constexpr):
    """View shared memory with another shape and layout."""
    if _RENAMED:
        return memory.reinterpret(memory.dtype, shape, layout)
    else:
        return memory._reinterpret(memory.dtype, shape, layout)


@gluon.jit
def retyped(memory, dtype: gl.constexpr, layout: gl.constexpr):
    """View shared memory as elements of another type of the same width."""
    if _RENAMED:
        return memory.reinterpret(dtype, memory.shape, layout)
    else:
        return memory._reinterpret(dtype, memory.shape, layout)


def descriptor(tensor: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """Return a TMA descriptor of a matrix, with boxes of shape `block`."""
    return describe(_descriptor, tensor, tuple(block))


def _descriptor(base, shape, strides, block) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[base.dtype])
    return TensorDescriptor(base, shape, strides, block, layout)
