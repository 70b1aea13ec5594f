"""The keys of AutoRound's own block (`quant_method: auto-round`). Read only.

`packing_format` says whether the tensors are laid out as in GPTQ, AWQ, compressed-tensors or a
native float8 checkpoint. `extra_config` lists the modules that differ, by name or by a regular
expression that is searched in the name.
"""

from typing import Any

from formats.codecs.config_fields import BLOCK
from formats.errors import COPY_BLOCK, CheckpointError, block_error, unsupported_error
from formats.rules import MAX_RULES, Rule
from formats.scheme import (
    ALL,
    CHANNEL,
    FP4_TYPES,
    MXFP8,
    ActivationSpec,
    QuantSpec,
    Scheme,
    checked_group_size,
)

# packing_format -> (layout, how zeros are stored)
PACKINGS = {
    "auto_round:auto_gptq": ("gptq", "v1"),
    "auto_round:gptq": ("gptq", "v1"),
    "auto_round:gptqmodel": ("gptq", "v2"),
    "auto_round": ("gptq", "v2"),
    "auto_round:auto_awq": ("awq", ""),
    "auto_round:awq": ("awq", ""),
    "auto_round:fp8_static": ("fp8", ""),
    "auto_round:fp8": ("fp8", ""),
    "auto_round:llm_compressor": ("compressed-tensors", ""),
}
# layout -> prefixes of its data types
DATA_TYPES = {
    "gptq": ("int",),
    "awq": ("int",),
    "fp8": ("fp",),
    "compressed-tensors": ("mx_fp", "nv_fp"),
}
BITS = (2, 3, 4, 5, 6, 7, 8)
FLOAT_BITS = 16  # a module with this many bits stays in float
# keys that a module of extra_config may override
KEYS = ("bits", "group_size", "sym", "data_type", "act_bits", "act_dynamic", "act_group_size")
_SPECIAL = set("*+?^$()[]{}|\\")


def read(block: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a QuantConfig. Raises CheckpointError, naming the key."""
    kind = block.get("data_type") or "int"
    if not isinstance(kind, str):
        raise block_error(f"{BLOCK}.data_type", f"expected a name, found {kind!r:.80}")
    usual = "auto_round:fp8" if kind.startswith("fp") else "auto_round:auto_gptq"
    packing = block.get("packing_format") or usual
    if not isinstance(packing, str) or packing not in PACKINGS:
        raise unsupported_error(
            f"{BLOCK}.packing_format",
            f"expected one of {', '.join(PACKINGS)}, found {packing!r:.80}",
        )
    if block.get("fmt", "e4m3") != "e4m3":
        raise unsupported_error(f"{BLOCK}.fmt", f"expected 'e4m3', found {block['fmt']!r:.80}")
    layout, zeros = PACKINGS[packing]
    stated = {name: block.get(name) for name in KEYS}
    scheme, reason = _scheme(stated, BLOCK, layout)
    if scheme is None:
        raise block_error(f"{BLOCK}.bits", f"expected 2 to 8, found {block['bits']!r}")
    extra = block.get("extra_config") or {}
    if not isinstance(extra, dict) or len(extra) > MAX_RULES:
        raise block_error(f"{BLOCK}.extra_config", f"expected an object, found {extra!r:.80}")
    rules = []
    head = False
    # names take precedence over expressions, wherever they are listed
    for key in sorted(extra, key=lambda key: bool(_SPECIAL & set(key))):
        values, where = extra[key], f"{BLOCK}.extra_config[{key[:80]!r}]"
        if not isinstance(values, dict):
            raise block_error(where, f"expected an object, found {values!r:.80}")
        changed = {name: value for name, value in values.items() if value is not None}
        own, own_reason = _scheme(stated | changed, where, layout)
        reason = reason or own_reason
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
        "unrounded_inputs": reason,
    }


def _scheme(values: dict[str, Any], where: str, layout: str) -> tuple[Scheme | None, str]:
    """Return (scheme, input rounding that is not applied here), or None for float."""
    bits, kind = values.get("bits"), values.get("data_type") or "int"
    if type(bits) is int and bits >= FLOAT_BITS:
        return None, ""
    starts = DATA_TYPES[layout]
    if not isinstance(kind, str) or not kind.startswith(starts):
        raise CheckpointError(
            f"{where}.data_type",
            f"expected {' or '.join(starts)} in this packing_format, found {kind!r:.80}",
            "quantize the float model",
        )
    if layout in ("gptq", "awq"):
        act_bits = values.get("act_bits")
        if act_bits is not None and (type(act_bits) is not int or act_bits < FLOAT_BITS):
            raise unsupported_error(f"{where}.act_bits", f"expected 16, found {act_bits!r:.80}")
        return _integers(values, where, layout), ""
    act_bits = values.get("act_bits") or FLOAT_BITS
    if type(act_bits) is not int or act_bits not in (4, 8) and act_bits < FLOAT_BITS:
        raise unsupported_error(f"{where}.act_bits", f"expected 4, 8 or 16, found {act_bits!r:.80}")
    is_rounded = act_bits < FLOAT_BITS
    if layout == "compressed-tensors":
        weight = _microscaled(kind, values, where)
        return Scheme(weight=weight), f"{act_bits}-bit float" if is_rounded else ""
    weight = _float8(values, where)
    return Scheme(weight=weight, activation=_inputs(values, weight) if is_rounded else None), ""


def _integers(values: dict[str, Any], where: str, layout: str) -> Scheme:
    bits, symmetric = values.get("bits"), values.get("sym")
    symmetric = True if symmetric is None else symmetric
    if type(bits) is not int or bits not in (BITS if layout == "gptq" else (4,)):
        raise block_error(f"{where}.bits", f"expected 2 to 8, found {bits!r:.80}")
    if not isinstance(symmetric, bool):
        raise block_error(f"{where}.sym", f"expected true or false, found {symmetric!r:.80}")
    size = checked_group_size(
        values.get("group_size"), f"{where}.group_size: group size", COPY_BLOCK
    )
    if layout == "awq":  # the file stores zeros, all 8 in a symmetric scheme
        symmetric = False
    return Scheme(weight=QuantSpec(bits=bits, symmetric=symmetric, group_size=size))


def _microscaled(kind: str, values: dict[str, Any], where: str) -> QuantSpec:
    """Return the scheme of MXFP4, MXFP8 or NVFP4, whose group sizes are fixed."""
    bits, size = values.get("bits"), values.get("group_size")
    known = {("mx_fp", 4): "mxfp4", ("mx_fp", 8): "mxfp8", ("nv_fp", 4): "nvfp4"}
    name = known.get((kind[:5], bits))
    if name is None:
        raise unsupported_error(
            f"{where}.bits", f"expected 4, or 8 of mx_fp, found {bits!r:.80} of {kind}"
        )
    wanted = FP4_TYPES.get(name, MXFP8.group_size)
    if size != wanted:
        raise block_error(f"{where}.group_size", f"expected {wanted} of {kind}, found {size!r:.80}")
    if name == "mxfp8":
        return MXFP8
    return QuantSpec(bits=4, symmetric=True, group_size=wanted, type=name)


def _float8(values: dict[str, Any], where: str) -> QuantSpec:
    """Read float8. Group size 0 is a scale per tensor, -1 one per output, a pair one per block."""
    bits, size = values.get("bits"), values.get("group_size")
    rows, columns = 1, CHANNEL
    if bits != 8:
        raise unsupported_error(f"{where}.bits", f"expected 8 of float, found {bits!r:.80}")
    if size == 0:
        rows = ALL
    elif isinstance(size, list):
        if len(size) != 2 or not all(type(part) is int and 8 <= part <= 2**20 for part in size):
            raise block_error(
                f"{where}.group_size", f"expected such as [128, 128], found {size!r:.80}"
            )
        rows, columns = size
    else:
        columns = checked_group_size(size, f"{where}.group_size: group size", COPY_BLOCK)
    return QuantSpec(bits=8, symmetric=True, group_size=columns, rows=rows, type="float")


def _inputs(values: dict[str, Any], weight: QuantSpec) -> ActivationSpec:
    """Return how float8 activations are rounded."""
    if not values.get("act_dynamic"):
        return ActivationSpec(type="float", dynamic=False, per="tensor")
    if weight.rows not in (1, ALL):
        return ActivationSpec(type="float", per="group", group_size=weight.group_size)
    return ActivationSpec(
        type="float", per="tensor" if values.get("act_group_size") == 0 else "token"
    )


def _block_rules(names: Any, scheme: Scheme) -> list[Rule]:
    """Keep every module in float that is not inside one of the listed blocks."""
    if not names:
        return []
    parts = names.split(",") if isinstance(names, str) else names
    if not isinstance(parts, list) or not all(isinstance(name, str) for name in parts):
        raise block_error(f"{BLOCK}.block_name_to_quantize", f"expected names, found {names!r:.80}")
    inside = [Rule(kind="contains", text=name.strip(), scheme=scheme) for name in parts if name]
    return [*inside, Rule(kind="all", scheme=None)]
