"""The keys of AMD's Quark (`quant_method: quark`). Read only.

`global_quant_config` applies to every linear, `layer_quant_config` to names with `*`. `exclude`
lists names that stay in float.
"""

from collections.abc import Mapping
from typing import Any

from formats.codecs.config_fields import BLOCK
from formats.errors import COPY_BLOCK, CheckpointError, block_error, unsupported_error
from formats.patterns import wildcard
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

FLOAT8 = "fp8_e4m3"
_SHARES = {"per_tensor": ALL, "per_channel": 1}
_KNOWN = (
    "fp8_e4m3 per tensor, per channel or in groups of 32 (MXFP8), fp4 in groups of 32 (MXFP4),"
    " int8 per channel, int4 and uint4 in groups"
)


def read(block: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a QuantConfig. Raises CheckpointError, naming the key."""
    export = block.get("export")
    export = export if isinstance(export, dict) else {}
    if export.get("weight_format", "real_quantized") != "real_quantized":
        raise CheckpointError(
            f"{BLOCK}.export.weight_format",
            f"expected 'real_quantized', found {export['weight_format']!r:.80}: the weights are"
            " float, and rounded again on every call",
            "export the model again with real_quantized",
        )
    order = export.get("pack_method", "reorder")
    if order not in ("reorder", "order"):
        raise unsupported_error(
            f"{BLOCK}.export.pack_method", f"expected 'reorder' or 'order', found {order!r:.80}"
        )
    for key in ("layer_type_quant_config", "softmax_quant_spec"):
        if block.get(key):
            raise CheckpointError(f"{BLOCK}.{key}", "is not supported", "quantize the float model")
    excluded = block.get("exclude") or []
    if not isinstance(excluded, list) or not all(isinstance(n, str) and n for n in excluded):
        raise block_error(
            f"{BLOCK}.exclude", f"expected a list of names and patterns, found {excluded!r:.80}"
        )
    rules = [Rule(kind="regex", text=_pattern(name), scheme=None) for name in excluded]
    named = block.get("layer_quant_config") or {}
    if not isinstance(named, dict) or len(named) + len(rules) > MAX_RULES:
        raise block_error(f"{BLOCK}.layer_quant_config", f"expected an object, found {named!r:.80}")
    reasons = []
    for pattern, keys in named.items():
        where = f"{BLOCK}.layer_quant_config[{pattern[:80]!r}]"
        scheme, reason = _scheme(keys, where)
        rules.append(Rule(kind="regex", text=wildcard(pattern), scheme=scheme))
        reasons.append(reason)
    scheme, reason = _scheme(block.get("global_quant_config"), f"{BLOCK}.global_quant_config")
    reasons.append(reason)
    if scheme is None:
        rules.append(Rule(kind="all", scheme=None))
        scheme = next((rule.scheme for rule in rules if rule.scheme is not None), None)
        if scheme is None:
            raise block_error(f"{BLOCK}.global_quant_config", "names no weight to quantize")
    return {
        "scheme": scheme,
        "rules": tuple(rules),
        "lm_head": True,  # unless a rule excludes it
        "kv_cache": _kv_cache(block.get("kv_cache_quant_config")),
        "quantizer": f"quark:{block.get('version', '')}",
        "layout": "quark" if order == "reorder" else "quark-in-order",
        "unrounded_inputs": next((reason for reason in reasons if reason), ""),
    }


def _scheme(keys: Any, where: str) -> tuple[Scheme | None, str]:
    """Return (scheme, input rounding that is not applied here), or None for float."""
    keys = {} if keys is None else keys
    if not isinstance(keys, dict):
        raise block_error(where, f"expected an object, found {keys!r:.80}")
    if keys.get("bias") is not None:
        raise unsupported_error(f"{where}.bias", "is not supported: biases must be float")
    if keys.get("weight") is None:
        return None, ""
    weight = _weight(keys["weight"], f"{where}.weight")
    activation, reason = _activation(keys.get("input_tensors"), weight, f"{where}.input_tensors")
    return Scheme(weight=weight, activation=activation), reason


def _weight(keys: Any, where: str) -> QuantSpec:
    if isinstance(keys, list):
        raise CheckpointError(
            where, f"has {len(keys)} rounding steps, expected one", "quantize the float model"
        )
    if not isinstance(keys, dict):
        raise block_error(where, f"expected an object, found {keys!r:.80}")
    dtype, share, size = keys.get("dtype"), keys.get("qscheme"), keys.get("group_size")
    is_mx = keys.get("scale_format") == "e8m0" and size == FP4_TYPES["mxfp4"]
    match dtype, share:
        case "fp8_e4m3", "per_tensor" | "per_channel":
            shared = _SHARES[share]
            return QuantSpec(bits=8, symmetric=True, group_size=CHANNEL, rows=shared, type="float")
        case "fp8_e4m3", "per_group" if is_mx:
            return MXFP8
        case "fp4", "per_group" if is_mx:
            return QuantSpec(bits=4, symmetric=True, group_size=size, type="mxfp4")
        case "int8", "per_channel" | "per_tensor":
            return QuantSpec(bits=8, symmetric=True, group_size=CHANNEL)
        case "int4" | "uint4", "per_group":
            size = checked_group_size(size, f"{where}.group_size: group size", COPY_BLOCK)
            # the file has zero points even for symmetric integers
            return QuantSpec(bits=4, symmetric=dtype == "int4", group_size=size)
    raise CheckpointError(
        where,
        f"expected {_KNOWN}; found {dtype!r:.40} {share!r:.40} with group_size {size!r:.40}",
        "quantize the float model",
    )


def _activation(keys: Any, weight: QuantSpec, where: str) -> tuple[ActivationSpec | None, str]:
    if keys is None:
        return None, ""
    if not isinstance(keys, dict):
        return None, "rounded several times"
    dtype, share, dynamic = keys.get("dtype"), keys.get("qscheme"), keys.get("is_dynamic")
    kind = {FLOAT8: "float", "int8": "int"}.get(dtype)
    fits = kind == ("float" if weight.type == "float" else "int") and weight != MXFP8
    usable = fits and weight.bits == 8 and keys.get("symmetric") is not False
    if usable and share == "per_tensor" and not dynamic:
        return ActivationSpec(type=kind, dynamic=False, per="tensor"), ""
    if usable and dynamic and share in ("per_tensor", "per_channel", "per_token"):
        per = "tensor" if share == "per_tensor" else "token"
        return ActivationSpec(type=kind, dynamic=True, per=per), ""
    return None, f"{dtype} {share}"


def _kv_cache(named: Any) -> str | None:
    """Return the format of k_proj's and v_proj's output_tensors; None if they have none."""
    if not isinstance(named, Mapping):
        return None
    for pattern, keys in named.items():
        outputs = keys.get("output_tensors") if isinstance(keys, dict) else None
        if outputs is None:
            continue
        caches = {FLOAT8: "fp8", "int8": "int8"}
        found = outputs.get("dtype") if isinstance(outputs, dict) else None
        if found not in caches or outputs.get("qscheme") != "per_tensor":
            raise CheckpointError(
                f"{BLOCK}.kv_cache_quant_config[{pattern[:80]!r}].output_tensors",
                f"expected {' or '.join(caches)} per_tensor, found {found!r:.40}",
                "remove the key to serve the model with a 16-bit KV cache",
            )
        return None if outputs.get("is_dynamic") else caches[found]
    return None


def _pattern(name: str) -> str:
    """Compile a name or a `re:` expression, as in compressed-tensors."""
    return name.removeprefix("re:") if name.startswith("re:") else wildcard(name)
