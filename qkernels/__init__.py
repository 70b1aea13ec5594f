"""Kernels and their references: the arithmetic of quantized models. Imports no triton by itself."""

import importlib

_LAZY = {"QuantLinear": "qkernels.quant_linear", "explain": "qkernels.dispatch"}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'qkernels' has no attribute {name!r}")
