"""The default row: Llama's layout. The rows of families.py replace some of its fields."""

from typing import Any

from formats.architecture.family import Family
from formats.architecture.rows.parts import USUAL


def family_row(architecture: str, title: str, model_type: str, **different: Any) -> Family:
    """Return the default row with some fields replaced."""
    return Family(
        architecture=architecture, title=title, model_type=model_type, **{**USUAL, **different}
    )
