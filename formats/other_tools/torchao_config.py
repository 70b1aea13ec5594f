"""The keys of a torchao block, as transformers writes it. Read only.

`quant_type` holds a configuration object of torchao. It and its inner objects are JSON objects with
the class as `_type` and the fields as `_data`.
"""

from collections.abc import Mapping
from typing import Any

from formats.codecs.config_fields import BLOCK
from formats.errors import COPY_BLOCK, QUANTIZE_FLOAT, CheckpointError, block_error
from formats.rules import Rule, float_modules
from formats.scheme import (
    ALL,
    CHANNEL,
    DEFAULT_GROUP_SIZE,
    ActivationSpec,
    QuantSpec,
    Scheme,
    checked_group_size,
)

WHERE = f"{BLOCK}.quant_type"
# Intx: torch's names of signed types -> bits
INTX_BITS = {f"int{bits}": bits for bits in range(2, 9)}
INT4_PACKINGS = ("plain", "tile_packed_to_4d")
BY_NAME = ("FqnToConfig", "ModuleFqnToConfig")
MAX_NAMES = 10_000
# Intx rounds inputs with zero points, which no kernel here supports.
WITH_ZEROS = "rounded to 8 bits with zero points, for each token"


def read(block: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a QuantConfig. Raises CheckpointError, naming the key."""
    stated = block.get("quant_type")
    if isinstance(stated, dict) and isinstance(stated.get("default"), dict):
        kind, data = _object(stated["default"], WHERE)
    else:
        raise CheckpointError(
            WHERE,
            f"expected a configuration object under 'default', found {stated!r:.120}",
            f"older torchao files are pickles; {QUANTIZE_FLOAT}",
        )
    if block.get("include_input_output_embeddings"):
        raise CheckpointError(
            f"{BLOCK}.include_input_output_embeddings",
            "quantized embeddings are not supported",
            QUANTIZE_FLOAT,
        )
    skipped = float_modules(block.get("modules_to_not_convert"), f"{BLOCK}.modules_to_not_convert")
    rules, others = (), []
    if kind in BY_NAME:
        named = data.get("fqn_to_config") or data.get("module_fqn_to_config")
        if not isinstance(named, dict) or not named or len(named) > MAX_NAMES:
            raise CheckpointError(WHERE, f"{kind} names no modules", QUANTIZE_FLOAT)
        rules, scheme, others = _by_name(named)
    else:
        scheme, unrounded = _scheme(kind, data)
        others = [unrounded]
    return {
        "scheme": scheme,
        "rules": (*skipped, *rules),
        "lm_head": True,  # the tensors say whether the head is quantized
        "unrounded_inputs": next((text for text in others if text), ""),
        "layout": "torchao",
    }


def _by_name(named: Mapping[str, Any]) -> tuple[tuple[Rule, ...], Scheme, list[str]]:
    """Return (rules, scheme of all other modules, input rounding that is not applied here)."""
    rules, default, others = [], None, []
    for name, value in named.items():
        scheme = None
        if value is not None:
            scheme, unrounded = _scheme(*_object(value, f"{WHERE} {name[:80]!r}"))
            others.append(unrounded)
        if name == "_default":
            default = scheme
            continue
        is_regex = name.startswith("re:")
        text = name.removeprefix("re:").removesuffix(".weight").removesuffix(r"\.weight")
        rules.append(Rule(kind="regex" if is_regex else "name", text=text, scheme=scheme))
    # whole names take precedence over expressions, as in torchao
    rules.sort(key=lambda rule: rule.kind == "regex")
    main = default or next((rule.scheme for rule in rules if rule.scheme is not None), None)
    if main is None:
        raise CheckpointError(WHERE, "quantizes no module", QUANTIZE_FLOAT)
    if default is None:
        rules.append(Rule(kind="all", scheme=None))
    return tuple(rules), main, others


def _object(value: Any, where: str) -> tuple[str, Mapping[str, Any]]:
    """Return (class, fields) of a configuration object."""
    if not isinstance(value, dict) or not isinstance(value.get("_type"), str):
        raise block_error(where, f"expected an object with a _type, found {value!r:.120}")
    data = value.get("_data", {})
    if not isinstance(data, dict):
        raise block_error(where, f"expected fields as _data, found {data!r:.80}")
    return value["_type"], data


def _scheme(kind: str, data: Mapping[str, Any]) -> tuple[Scheme, str]:
    """Return (scheme, input rounding that is not applied here)."""
    if kind not in _READ:
        raise CheckpointError(
            WHERE, f"{kind[:60]!r}: supported are {', '.join(_READ)}", QUANTIZE_FLOAT
        )
    return _READ[kind](data)


def _int8(data: Mapping[str, Any]) -> tuple[Scheme, str]:
    return Scheme(weight=QuantSpec(bits=8, symmetric=True, group_size=_groups(data))), ""


def _int8_dynamic(data: Mapping[str, Any]) -> tuple[Scheme, str]:
    weight = QuantSpec(bits=8, symmetric=True, group_size=CHANNEL)
    if _value(data, "act_mapping_type", "SYMMETRIC") != "SYMMETRIC":
        return Scheme(weight=weight), WITH_ZEROS
    return Scheme(weight=weight, activation=ActivationSpec(per=_per(data))), ""


def _float8(data: Mapping[str, Any]) -> tuple[Scheme, str]:
    return Scheme(weight=_float8_spec(data)), ""


def _float8_dynamic(data: Mapping[str, Any]) -> tuple[Scheme, str]:
    activation = ActivationSpec(type="float", per=_per(data))
    return Scheme(weight=_float8_spec(data), activation=activation), ""


def _float8_spec(data: Mapping[str, Any]) -> QuantSpec:
    if _value(data, "weight_dtype", "float8_e4m3fn") != "float8_e4m3fn":
        raise CheckpointError(
            WHERE, f"expected float8_e4m3fn weights, found {data}"[:200], QUANTIZE_FLOAT
        )
    rows = ALL if _per(data, of_weight=True) == "tensor" else 1
    return QuantSpec(bits=8, symmetric=True, group_size=CHANNEL, rows=rows, type="float")


def _int4(data: Mapping[str, Any]) -> tuple[Scheme, str]:
    packing = _value(data, "int4_packing_format", "plain").lower()
    if packing not in INT4_PACKINGS:
        raise CheckpointError(
            WHERE,
            f"int4_packing_format {packing[:40]!r} is the layout of one kernel;"
            f" {' and '.join(INT4_PACKINGS)} are read",
            QUANTIZE_FLOAT,
        )
    if packing != "plain" and data.get("int4_tile_packed_ntile", 8) != 8:
        raise CheckpointError(
            WHERE,
            "int4_tile_packed_ntile: expected 8, found"
            f" {data['int4_tile_packed_ntile']!r:.40}, AMD's order of inputs",
            QUANTIZE_FLOAT,
        )
    size = checked_group_size(
        data.get("group_size", DEFAULT_GROUP_SIZE), f"{WHERE}: group size", COPY_BLOCK
    )
    return Scheme(weight=QuantSpec(bits=4, symmetric=False, group_size=size, type="floatzero")), ""


def _intx(data: Mapping[str, Any]) -> tuple[Scheme, str]:
    dtype = _value(data, "weight_dtype", "int8")
    packing = _value(data, "intx_packing_format", "UNPACKED_TO_INT8")
    if dtype not in INTX_BITS or packing.upper() != "UNPACKED_TO_INT8":
        raise CheckpointError(
            WHERE, f"{dtype[:40]} as {packing[:40]}: supported is UNPACKED_TO_INT8", QUANTIZE_FLOAT
        )
    mapping = _value(data, "weight_mapping_type", "") or _value(data, "mapping_type", "SYMMETRIC")
    return Scheme(
        weight=QuantSpec(
            bits=INTX_BITS[dtype],
            symmetric=mapping.startswith("SYMMETRIC"),
            group_size=_groups(data),
        )
    ), ""


def _intx_dynamic(data: Mapping[str, Any]) -> tuple[Scheme, str]:
    scheme, _ = _intx({"weight_dtype": {"_data": "int8"}, **data})
    return scheme, WITH_ZEROS


_READ = {
    "Int8WeightOnlyConfig": _int8,
    "Int8DynamicActivationInt8WeightConfig": _int8_dynamic,
    "Float8WeightOnlyConfig": _float8,
    "Float8DynamicActivationFloat8WeightConfig": _float8_dynamic,
    "Int4WeightOnlyConfig": _int4,
    "IntxWeightOnlyConfig": _intx,
    "Int8DynamicActivationIntxWeightConfig": _intx_dynamic,
}


def _value(data: Mapping[str, Any], key: str, default: str) -> str:
    """Return a name that is given as a string or inside an object."""
    value = data.get(key, default)
    value = value.get("_data", default) if isinstance(value, dict) else value
    if value is None:
        return default
    if not isinstance(value, str):
        raise block_error(f"{WHERE} {key}", f"expected a name, found {value!r:.80}")
    return value


def _groups(data: Mapping[str, Any]) -> int:
    """Return the number of inputs that share a scale."""
    stated = data.get("weight_granularity") or data.get("granularity")
    size = data.get("group_size")
    if isinstance(stated, dict):
        kind, fields = _object(stated, f"{WHERE} granularity")
        if kind not in ("PerRow", "PerAxis", "PerGroup"):
            raise CheckpointError(
                f"{WHERE} granularity",
                f"expected PerRow or PerGroup, found {kind[:40]!r}",
                QUANTIZE_FLOAT,
            )
        size = fields.get("group_size") if kind == "PerGroup" else None
    if size is None:
        return CHANNEL
    return checked_group_size(size, f"{WHERE}: group size", COPY_BLOCK)


def _per(data: Mapping[str, Any], of_weight: bool = False) -> str:
    """Return the extent of a scale: "token" (for a weight: per output) or "tensor"."""
    stated = data.get("granularity")
    if isinstance(stated, list):
        stated = stated[1 if of_weight else 0] if len(stated) == 2 else stated
    if stated is None:
        return "token"
    kind, _ = _object(stated, f"{WHERE} granularity")
    known = {"PerRow": "token", "PerTensor": "tensor"}
    if kind not in known:
        raise CheckpointError(
            f"{WHERE} granularity",
            f"expected PerRow or PerTensor, found {kind[:40]!r}",
            QUANTIZE_FLOAT,
        )
    return known[kind]
