"""Shapes that torchao states in a safetensors header for weights that it padded."""

import json
from collections.abc import Iterable
from typing import Any

# PADDED_FIELD: scales and zeros of a module with padded int4 tiles. SHAPE_FIELD: the entry that the
# reader adds for the shape without padding.
PADDED_FIELD, SHAPE_FIELD = "_weight_scale_and_zero", "_weight_shape"


def padded_shapes(metadata: Any, names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return the shapes [N, K] without padding, by the names of the entries to add for them.

    Raises KeyError, TypeError or ValueError if the metadata is damaged.
    """
    found = {}
    for name in names:
        if not name.endswith(f".{PADDED_FIELD}") or not isinstance(metadata, dict):
            continue
        module = name.removesuffix(f".{PADDED_FIELD}")
        stated = metadata.get(f"{module}.weight")
        if stated is None:
            continue
        rows, columns = json.loads(stated)["_data"]["shape"]
        if type(rows) is not int or type(columns) is not int:
            raise TypeError(f"{module}.weight has a shape that is not whole numbers")
        found[f"{module}.{SHAPE_FIELD}"] = (rows, columns)
    return found
