"""The keys of AutoRound's own block (`quant_method: auto-round`). Read only; knows no tensors.

The tensors are those of GPTQ or AWQ, as `packing_format` says; `extra_config` names the modules
that differ, by their names or by expressions that are searched in them.
"""

from typing import Any

from formats.config_fields import BLOCK
from formats.errors import CheckpointError
from formats.rules import Rule
from formats.scheme import QuantSpec, Scheme, checked_group_size

MAX_RULES = 20_000
# packing_format -> (layout, how zeros are stored)
PACKINGS = {
    "auto_round:auto_gptq": ("gptq", "v1"),
    "auto_round:gptq": ("gptq", "v1"),
    "auto_round:gptqmodel": ("gptq", "v2"),
    "auto_round": ("gptq", "v2"),
    "auto_round:auto_awq": ("awq", ""),
    "auto_round:awq": ("awq", ""),
}
BITS = (2, 3, 4, 5, 6, 7, 8)
FLOAT_BITS = 16  # such bits mean that a module stays in float
_SPECIAL = set("*+?^$()[]{}|\\")


def read(block: dict[str, Any]) -> dict[str, Any]:
    """The fields of a QuantConfig. Raises CheckpointError, naming the key."""
    packing = block.get("packing_format", "auto_round:auto_gptq")
    if not isinstance(packing, str) or packing not in PACKINGS:
        raise CheckpointError(
            f"{BLOCK}.packing_format", f"expected one of {', '.join(PACKINGS)}, found {packing!r}"
        )
    if block.get("data_type", "int") not in ("int", None):
        raise CheckpointError(f"{BLOCK}.data_type", f"expected 'int', found {block['data_type']!r}")
    act_bits = block.get("act_bits", FLOAT_BITS)
    if act_bits is not None and (not isinstance(act_bits, int) or act_bits < FLOAT_BITS):
        raise CheckpointError(f"{BLOCK}.act_bits", f"expected 16, found {act_bits!r}")
    layout, zeros = PACKINGS[packing]
    scheme = _scheme(block, BLOCK, layout)
    if scheme is None:
        raise CheckpointError(f"{BLOCK}.bits", f"expected 2 to 8, found {block['bits']!r}")
    extra = block.get("extra_config") or {}
    if not isinstance(extra, dict) or len(extra) > MAX_RULES:
        raise CheckpointError(f"{BLOCK}.extra_config", "expected an object")
    rules = []
    head = False
    # names go before expressions, whatever their order
    for key in sorted(extra, key=lambda key: bool(_SPECIAL & set(key))):
        values = extra[key]
        if not isinstance(values, dict):
            raise CheckpointError(f"{BLOCK}.extra_config[{key[:80]!r}]", "expected an object")
        stated = {name: block.get(name) for name in ("bits", "group_size", "sym")}
        stated |= {name: value for name, value in values.items() if value is not None}
        own = _scheme(stated, f"{BLOCK}.extra_config[{key[:80]!r}]", layout)
        head = head or (key == "lm_head" and own is not None)
        if not _SPECIAL & set(key):
            rules.append(Rule(kind="name", text=key, scheme=own))
        else:
            rules.append(Rule(kind="regex", text=f".*(?:{key})", scheme=own))
    return {
        "scheme": scheme,
        "rules": (*rules, *_block_rules(block.get("block_name_to_quantize"), scheme)),
        "zeros": zeros,
        "lm_head": head or bool(block.get("quant_lm_head", False)),
        "quantizer": f"auto-round:{block.get('autoround_version', '')}",
        "layout": layout,
    }


def _scheme(values: dict[str, Any], where: str, layout: str) -> Scheme | None:
    """None: the module stays in float."""
    bits, symmetric = values.get("bits"), values.get("sym", True)
    if type(bits) is int and bits >= FLOAT_BITS:
        return None
    if type(bits) is not int or bits not in (BITS if layout == "gptq" else (4,)):
        raise CheckpointError(f"{where}.bits", f"expected 2 to 8, found {bits!r}")
    if not isinstance(symmetric, bool):
        raise CheckpointError(f"{where}.sym", f"expected true or false, found {symmetric!r}")
    size = checked_group_size(values.get("group_size"), f"{where}.group_size: group size")
    if layout == "awq":  # with zeros in the file, which are 8 where the scheme is symmetric
        symmetric = False
    spec = QuantSpec(bits=bits, symmetric=symmetric, group_size=size)
    return Scheme(weight=spec)


def _block_rules(names: Any, scheme: Scheme) -> list[Rule]:
    """What is not below one of these modules stays in float."""
    if not names:
        return []
    parts = names.split(",") if isinstance(names, str) else names
    if not isinstance(parts, list) or not all(isinstance(name, str) for name in parts):
        raise CheckpointError(f"{BLOCK}.block_name_to_quantize", "expected names")
    inside = [Rule(kind="contains", text=name.strip(), scheme=scheme) for name in parts if name]
    return [*inside, Rule(kind="all", scheme=None)]
