"""The keys of a native "fp8" block, as DeepSeek and Qwen publish their float8 models. Read only.

A weight has one scale for each block (`weight_scale_inv`, by which it is multiplied all the same)
or one for the whole tensor (`weight_scale`). Knows no tensors.
"""

import re
from typing import Any

from formats.config_fields import BLOCK
from formats.errors import CheckpointError
from formats.rules import Rule
from formats.scheme import ALL, CHANNEL, ActivationSpec, QuantSpec, Scheme

MAX_NAMES = 20_000


def read(block: dict[str, Any]) -> dict[str, Any]:
    """The fields of a QuantConfig. Raises CheckpointError, naming the key."""
    when = block.get("activation_scheme", "dynamic")
    if when not in ("dynamic", "static"):
        raise CheckpointError(
            f"{BLOCK}.activation_scheme", f"expected 'dynamic' or 'static', found {when!r}"
        )
    if block.get("fmt", "e4m3") != "e4m3":
        raise CheckpointError(f"{BLOCK}.fmt", f"expected 'e4m3', found {block['fmt']!r}")
    size = block.get("weight_block_size")
    rows, columns = ALL, CHANNEL
    activation = ActivationSpec(type="float")
    if size is not None:
        if (
            not isinstance(size, list)
            or len(size) != 2
            or not all(type(part) is int and 8 <= part <= 2**20 for part in size)
        ):
            raise CheckpointError(
                f"{BLOCK}.weight_block_size", f"expected such as [128, 128], found {size!r}"
            )
        rows, columns = size
        activation = ActivationSpec(type="float", per="group", group_size=columns)
    if when == "static":
        if size is not None:
            raise CheckpointError(
                f"{BLOCK}.activation_scheme", "static scales do not go with weight_block_size"
            )
        activation = ActivationSpec(type="float", dynamic=False, per="tensor")
    weight = QuantSpec(bits=8, symmetric=True, group_size=columns, rows=rows, type="float")
    names = block.get("modules_to_not_convert") or block.get("ignored_layers") or []
    if (
        not isinstance(names, list)
        or len(names) > MAX_NAMES
        or not all(isinstance(name, str) and name for name in names)
    ):
        raise CheckpointError(f"{BLOCK}.modules_to_not_convert", "expected a list of names")
    return {
        "scheme": Scheme(weight=weight, activation=activation),
        # a whole name, the end of one, or a module with all that is below it
        "rules": tuple(
            Rule(kind="regex", text=rf"(?:.*\.)?{re.escape(name)}(?:\..*)?$", scheme=None)
            for name in names
        ),
        "layout": "fp8",
    }
