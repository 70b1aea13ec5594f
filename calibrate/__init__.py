"""Quantize float models, one decoder layer at a time.

Exported names are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from calibrate.pipeline import quantize_checkpoint
    from calibrate.recipe import RECIPES, Recipe
    from formats.names import RecipeName

_MODULES = {
    "RECIPES": "calibrate.recipe",
    "Recipe": "calibrate.recipe",
    "RecipeName": "formats.names",
    "quantize_checkpoint": "calibrate.pipeline",
}
__all__ = ["RECIPES", "Recipe", "RecipeName", "quantize_checkpoint"]

if not TYPE_CHECKING:  # a type checker reads the imports above, and reports other names

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return getattr(importlib.import_module(_MODULES[name]), name)
        raise AttributeError(f"module 'calibrate' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
