"""Float weights of all experts in one tensor per projection, presented as a linear per expert.

The row of a family names the two tensors of a layer (`Experts.stacks`).
Legend: E experts, N outputs, K inputs; gate_up has N = 2 I outputs, gate's I first.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from formats.architecture.expert_names import experts_apart
from formats.architecture.expert_stacks import FLOATS, REMEDY
from formats.architecture.family import Projection
from formats.errors import CheckpointError
from formats.families import FAMILIES
from formats.files.tensor_entry import TensorEntry


def split_float_stacks(
    config: Mapping[str, Any], entries: dict[str, TensorEntry]
) -> dict[str, TensorEntry]:
    """Return the tensors with the stacks of a family's row as one matrix [N, K] per linear.

    Raises CheckpointError for a stack that is not float, or whose shape does not divide.
    """
    experts = experts_apart(config)
    if experts is None or not experts.stacks:
        return entries
    family = FAMILIES[config["architectures"][0]]
    layer = re.escape(family.layer).replace(re.escape("{i}"), r"\d{1,9}")
    names = "|".join(map(re.escape, experts.stacks))
    stack = re.compile(rf"(?P<layer>{layer})\.(?P<stack>{names})(?P<rest>[._]\w+)?")
    projections = dict(zip(experts.stacks, (experts.gate_up, experts.down), strict=True))
    found = {}
    for name, entry in entries.items():
        match = stack.fullmatch(name)
        if match is None:
            found[name] = entry
            continue
        if match["rest"] or entry.dtype not in FLOATS or len(entry.shape) != 3:
            raise CheckpointError(
                f"{match['layer']}.{match['stack']}",
                f"expected float weights of all experts in three dims, found {name}"
                f" {entry.dtype} {list(entry.shape)}",
                REMEDY,
            )
        projection = projections[match["stack"]]
        found |= _linears(match["layer"], name, entry, projection)
    return found


def _linears(prefix: str, name: str, entry: Any, projection: Projection) -> dict[str, TensorEntry]:
    """Return the entries of one stack's linears."""
    count = len(projection.members)
    experts, rows, _ = entry.shape
    if rows % count:
        raise CheckpointError(name, f"{rows} rows cannot be divided by {count} linears", REMEDY)
    each = rows // count
    return {
        f"{prefix}.{linear.name}.weight": _rows(
            entry, f"{prefix}.{linear.name}.weight", expert, each * place, each
        )
        for expert in range(experts)
        for place, linear in enumerate(projection.expert(expert).linears)
    }


def _rows(entry: Any, name: str, expert: int, start: int, count: int) -> Any:
    """Return `count` outputs of one expert."""
    if not isinstance(entry, TensorEntry):  # a tensor in memory (HeldTensors)
        return replace(entry, tensor=entry.tensor[expert, start : start + count])
    _, rows, columns = entry.shape
    size = columns * entry.dtype.itemsize
    return replace(
        entry,
        name=name,
        shape=(count, columns),
        num_bytes=count * size,
        offset=entry.offset + (expert * rows + start) * size,
    )
