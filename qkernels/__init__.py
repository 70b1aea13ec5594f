"""Kernels for quantized models and their plain torch references. Public names load on first use."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from formats.names import SchemeName
    from qkernels.operations import explain
    from qkernels.quant_linear import QuantLinear
    from qkernels.replace import replace_linears
    from qkernels.trainable_linear import TrainableQuantLinear

_MODULES = {
    "QuantLinear": "qkernels.quant_linear",
    "SchemeName": "formats.names",
    "TrainableQuantLinear": "qkernels.trainable_linear",
    "explain": "qkernels.operations",
    "replace_linears": "qkernels.replace",
}
__all__ = ["QuantLinear", "SchemeName", "TrainableQuantLinear", "explain", "replace_linears"]

if not TYPE_CHECKING:  # a type checker reads the imports above, and reports other names

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return getattr(importlib.import_module(_MODULES[name]), name)
        raise AttributeError(f"module 'qkernels' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
