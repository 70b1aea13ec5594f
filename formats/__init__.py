"""Format of quantized checkpoints: schemes, layouts, codecs. Public names load on first use."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from formats.errors import InputError
    from formats.in_memory.packed import PackedWeight
    from formats.names import FormatName, RecipeName, SchemeName
    from formats.save import save_quantized
    from formats.scheme import ActivationSpec, QuantSpec, Scheme

_MODULES = {
    "ActivationSpec": "formats.scheme",
    "FormatName": "formats.names",
    "InputError": "formats.errors",
    "PackedWeight": "formats.in_memory.packed",
    "QuantSpec": "formats.scheme",
    "RecipeName": "formats.names",
    "Scheme": "formats.scheme",
    "SchemeName": "formats.names",
    "save_quantized": "formats.save",
}
__all__ = [
    "ActivationSpec",
    "FormatName",
    "InputError",
    "PackedWeight",
    "QuantSpec",
    "RecipeName",
    "Scheme",
    "SchemeName",
    "save_quantized",
]

if not TYPE_CHECKING:  # a type checker reads the imports above, and reports other names

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return getattr(importlib.import_module(_MODULES[name]), name)
        raise AttributeError(f"module 'formats' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
