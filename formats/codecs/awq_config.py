"""The keys of an AWQ block, in AutoAWQ's old and new spelling."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from formats.codecs.config_fields import BLOCK, ConfigFields
from formats.errors import COPY_BLOCK, CheckpointError, block_error, unsupported_error
from formats.rules import Rule
from formats.scheme import QuantSpec, Scheme, checked_group_size

# `version` -> layout of the tensors; only the first is written
LAYOUTS = {"gemm": "awq", "gemv": "awq-gemv"}


def stored(scheme: Scheme) -> Scheme:
    """Return the scheme as it reads back: symmetric becomes asymmetric with zeros of 8.

    If a config says symmetric, servers do not use their fast kernels, and some refuse the
    checkpoint.
    """
    return replace(scheme, weight=replace(scheme.weight, symmetric=False))


def read(block: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a QuantConfig. Raises CheckpointError, naming the key."""
    bits = block.get("bits", block.get("w_bit"))
    if bits != 4 or isinstance(bits, bool | float):
        raise unsupported_error(f"{BLOCK}.bits", f"expected 4, found {bits!r}")
    group_size = block.get("group_size", block.get("q_group_size"))
    zero_point = block.get("zero_point")
    if not isinstance(zero_point, bool):
        raise block_error(f"{BLOCK}.zero_point", f"expected true or false, found {zero_point!r}")
    version = str(block.get("version", "gemm")).lower()
    if version not in LAYOUTS:
        raise unsupported_error(
            f"{BLOCK}.version", f"expected {' or '.join(LAYOUTS)}, found {block['version']!r}"
        )
    spec = QuantSpec(
        bits=4,
        symmetric=not zero_point,
        group_size=checked_group_size(group_size, f"{BLOCK}.group_size: group size", COPY_BLOCK),
    )
    skipped = block.get("modules_to_not_convert") or []
    if not isinstance(skipped, list) or not all(isinstance(s, str) and s for s in skipped):
        raise block_error(
            f"{BLOCK}.modules_to_not_convert", f"expected a list of names, found {skipped!r:.80}"
        )
    return {
        "scheme": Scheme(weight=spec),
        "rules": tuple(Rule(kind="contains", text=name, scheme=None) for name in skipped),
        "lm_head": bool(block.get("lm_head", False)),
        "layout": LAYOUTS[version],
    }


def write(config: ConfigFields) -> dict[str, Any]:
    """Return the block for config.json."""
    spec = config.scheme.weight
    block = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": spec.group_size,
        "zero_point": not spec.symmetric,
        "version": "gemm",
        "modules_to_not_convert": [rule.text for rule in config.rules] or None,
    }
    if config.lm_head:
        block["lm_head"] = True
    return block


def rules_for(
    schemes: Mapping[str, Scheme | None], others: Mapping[str, Scheme | None]
) -> tuple[Rule, ...]:
    """Return the names of modules that stay in float; AWQ has one scheme for all others."""
    for name, scheme in others.items():
        if scheme is not None:
            raise CheckpointError(
                name,
                f"cannot have the scheme {scheme}: AWQ has one scheme for all linears",
                "write compressed-tensors or gptq",
            )
    return tuple(Rule(kind="contains", text=name, scheme=None) for name in others)
