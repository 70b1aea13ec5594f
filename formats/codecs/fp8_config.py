"""The keys of a native "fp8" block, as DeepSeek and Qwen publish their float8 models. Read only.

A weight has one scale for each block, or one for the whole tensor. The scale is called
`weight_scale_inv` or `weight_scale`; the weight is multiplied by it in both cases. The scale of a
static activation is called `activation_scale` (transformers) or `input_scale` (vLLM).
"""

from typing import Any

from formats.codecs.config_fields import BLOCK
from formats.errors import block_error, unsupported_error
from formats.rules import float_modules
from formats.scheme import ALL, CHANNEL, ActivationSpec, QuantSpec, Scheme


def read(block: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a QuantConfig. Raises CheckpointError, naming the key."""
    when = block.get("activation_scheme", "dynamic")
    when = when.lower() if isinstance(when, str) else when  # transformers does the same
    if when not in ("dynamic", "static"):
        raise block_error(
            f"{BLOCK}.activation_scheme", f"expected 'dynamic' or 'static', found {when!r}"
        )
    if block.get("fmt", "e4m3") != "e4m3":
        raise unsupported_error(f"{BLOCK}.fmt", f"expected 'e4m3', found {block['fmt']!r}")
    size = block.get("weight_block_size")
    rows, columns = ALL, CHANNEL
    activation = ActivationSpec(type="float")
    if size is not None:
        if (
            not isinstance(size, list)
            or len(size) != 2
            or not all(type(part) is int and 8 <= part <= 2**20 for part in size)
        ):
            raise block_error(
                f"{BLOCK}.weight_block_size", f"expected such as [128, 128], found {size!r}"
            )
        rows, columns = size
        activation = ActivationSpec(type="float", per="group", group_size=columns)
    if when == "static":
        if size is not None:
            raise block_error(
                f"{BLOCK}.activation_scheme", "static scales do not go with weight_block_size"
            )
        activation = ActivationSpec(type="float", dynamic=False, per="tensor")
    weight = QuantSpec(bits=8, symmetric=True, group_size=columns, rows=rows, type="float")
    names = block.get("modules_to_not_convert") or block.get("ignored_layers")
    return {
        "scheme": Scheme(weight=weight, activation=activation),
        "rules": float_modules(names, f"{BLOCK}.modules_to_not_convert"),
        "layout": "fp8",
    }
