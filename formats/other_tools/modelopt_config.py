"""The keys of NVIDIA's Model Optimizer (`quant_method: modelopt`). Read only.

The tool's own file, hf_quant_config.json, has the keys below `quantization`. config.json also has
keys in compressed-tensors' style, which are less specific than `quant_algo`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from formats.checkpoint import read_json
from formats.codecs.config_fields import BLOCK
from formats.codecs.kv_cache import KEY, read_kv_scheme
from formats.errors import COPY_BLOCK, CheckpointError, block_error, unsupported_error
from formats.patterns import wildcard
from formats.rules import MAX_RULES, Rule
from formats.scheme import (
    ALL,
    CHANNEL,
    DEFAULT_GROUP_SIZE,
    FP4_TYPES,
    MXFP8,
    ActivationSpec,
    QuantSpec,
    Scheme,
    checked_group_size,
)

METHODS = ("modelopt", "modelopt_fp4", "modelopt_mixed")
SECOND_FILE = "hf_quant_config.json"
MIXED = "MIXED_PRECISION"

_FP8 = {"bits": 8, "symmetric": True, "type": "float"}
_STATIC_FP8 = ActivationSpec(type="float", dynamic=False, per="tensor")
_INT8 = QuantSpec(bits=8, symmetric=True, group_size=CHANNEL)
_NVFP4 = QuantSpec(bits=4, symmetric=True, group_size=FP4_TYPES["nvfp4"], type="nvfp4")
_MXFP4 = QuantSpec(bits=4, symmetric=True, group_size=FP4_TYPES["mxfp4"], type="mxfp4")
# quant_algo, in capitals -> (scheme, input rounding of the file that is not applied here)
ALGORITHMS: dict[str, tuple[Scheme, str]] = {
    "FP8": (
        Scheme(weight=QuantSpec(**_FP8, group_size=CHANNEL, rows=ALL), activation=_STATIC_FP8),
        "",
    ),
    "FP8_PER_CHANNEL_PER_TOKEN": (
        Scheme(
            weight=QuantSpec(**_FP8, group_size=CHANNEL), activation=ActivationSpec(type="float")
        ),
        "",
    ),
    "FP8_PB_WO": (Scheme(weight=QuantSpec(**_FP8, group_size=128, rows=128)), ""),
    "MXFP8": (Scheme(weight=MXFP8), "8-bit float with power-of-two scales"),
    "NVFP4": (Scheme(weight=_NVFP4), "4-bit float"),
    "NVFP4_AWQ": (Scheme(weight=_NVFP4), "4-bit float"),
    "W4A16_NVFP4": (Scheme(weight=_NVFP4), ""),
    "W4A8_NVFP4_FP8": (Scheme(weight=_NVFP4), "8-bit float"),
    "MXFP4": (Scheme(weight=_MXFP4), "4-bit float"),
    "W4A8_MXFP4_FP8": (Scheme(weight=_MXFP4), "8-bit float"),
    "W4A16_AWQ": (Scheme(weight=QuantSpec(bits=4, symmetric=True)), ""),
    "W8A16": (Scheme(weight=_INT8), ""),
    "W8A8_SQ_PER_CHANNEL": (
        Scheme(weight=_INT8, activation=ActivationSpec(dynamic=False, per="tensor")),
        "",
    ),
}
# unsupported algorithm -> what it does
REFUSED = {
    "NVFP4_SVD": "adds a product of two small float matrices to every linear (SVDQuant)",
    "W4A8_AWQ": "rounds 4-bit integer weights to float8 a second time",
}


def read(block: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a QuantConfig. Raises CheckpointError, naming the key."""
    values = block.get("quantization", block)
    if not isinstance(values, dict):
        raise block_error(f"{BLOCK}.quantization", f"expected an object, found {values!r:.80}")
    kv_cache = _kv_cache(values)
    excluded = values.get("exclude_modules", values.get("ignore")) or []
    rules = [
        Rule(kind="regex", text=_pattern(name), scheme=None)
        for name in _names(excluded, f"{BLOCK}.exclude_modules")
    ]
    algorithm = values.get("quant_algo")
    if algorithm is None and kv_cache is not None:
        return {"scheme": None, "rules": (), "kv_cache": kv_cache, "layout": "modelopt"}
    if algorithm == MIXED:
        named = values.get("quantized_layers")
        if not isinstance(named, dict) or not named or len(named) > MAX_RULES:
            raise block_error(
                f"{BLOCK}.quantized_layers", f"expected an object with a name, found {named!r:.80}"
            )
        found = {
            name: _scheme(keys, f"{BLOCK}.quantized_layers[{name[:80]!r}]")
            for name, keys in named.items()
        }
        rules += [
            Rule(kind="regex", text=_pattern(name), scheme=scheme)
            for name, (scheme, _) in found.items()
        ]
        rules.append(Rule(kind="all", scheme=None))
    else:
        found = {"": _scheme(values, BLOCK)}
    return {
        "scheme": next(iter(found.values()))[0],
        "rules": tuple(rules),
        "lm_head": True,  # unless a rule excludes it
        "kv_cache": kv_cache,
        "quantizer": _producer(block),
        "layout": "modelopt",
        "unrounded_inputs": next((reason for _, reason in found.values() if reason), ""),
    }


def algorithms(block: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the `quant_algo` of a block, or of its layers if they differ.

    The names are in capitals and unchecked.
    """
    values = block.get("quantization", block)
    values = values if isinstance(values, dict) else {}
    named = values.get("quantized_layers")
    each = [values]
    if values.get("quant_algo") == MIXED and isinstance(named, dict):
        each = [keys for keys in named.values() if isinstance(keys, dict)]
    return tuple(dict.fromkeys(str(keys.get("quant_algo")).upper() for keys in each))


def completed(folder: Path, block: dict[str, Any]) -> dict[str, Any]:
    """Return config.json's block with the group size.

    For 4-bit integers, only hf_quant_config.json states the group size. Raises CheckpointError if
    that file cannot be read.
    """
    path = folder / SECOND_FILE
    if "group_size" in block or _weight_key(block, "group_size") is not None or not path.is_file():
        return block
    own = read_json(path).get("quantization")
    size = own.get("group_size") if isinstance(own, dict) else None
    return block if size is None else {**block, "group_size": size}


def _scheme(keys: Any, where: str) -> tuple[Scheme, str]:
    """Return (scheme, input rounding that is not applied here) of an algorithm."""
    if not isinstance(keys, dict):
        raise block_error(where, f"expected an object, found {keys!r:.80}")
    algorithm = keys.get("quant_algo")
    name = algorithm.upper() if isinstance(algorithm, str) else ""
    if name in REFUSED:
        raise CheckpointError(
            f"{where}.quant_algo",
            f"{algorithm} {REFUSED[name]}, which is not supported",
            "quantize the float model",
        )
    if name not in ALGORITHMS:
        raise CheckpointError(
            f"{where}.quant_algo",
            f"expected one of {', '.join(ALGORITHMS)} or {MIXED}, found {algorithm!r:.80}",
            "quantize the float model",
        )
    scheme, unrounded = ALGORITHMS[name]
    bits = _weight_key(keys, "num_bits")
    if isinstance(bits, int | str) and bits != scheme.weight.bits:
        raise CheckpointError(
            f"{where}.config_groups",
            f"expected weights of {scheme.weight.bits} bits with {algorithm}, found {bits!r:.80}",
            "copy config.json from the original checkpoint",
        )
    size = keys.get("group_size") or _weight_key(keys, "group_size")
    fixed = scheme.weight.group_size
    if name == "W4A16_AWQ":
        size = checked_group_size(
            size or DEFAULT_GROUP_SIZE, f"{where}.group_size: group size", COPY_BLOCK
        )
        weight = QuantSpec(bits=4, symmetric=True, group_size=size)
        return Scheme(weight=weight), unrounded
    if size and scheme.weight.type in (*FP4_TYPES, "float") and fixed != CHANNEL and size != fixed:
        raise unsupported_error(
            f"{where}.group_size", f"expected {fixed} with {algorithm}, found {size!r:.80}"
        )
    return scheme, unrounded


def _weight_key(keys: Mapping[str, Any], name: str) -> Any:
    """Return a key of the weights from the keys in compressed-tensors' style, or None."""
    groups = keys.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and weights.get(name):
            return weights[name]
    return None


def _kv_cache(values: Mapping[str, Any]) -> str | None:
    stated = values.get("kv_cache_quant_algo") or values.get(KEY)
    if isinstance(stated, dict) or stated is None:
        return read_kv_scheme(stated, f"{BLOCK}.{KEY}")[0]
    caches = {"FP8": "fp8", "INT8": "int8"}
    if stated not in caches:
        raise CheckpointError(
            f"{BLOCK}.kv_cache_quant_algo",
            f"expected {' or '.join(caches)}, found {stated!r:.80}",
            "remove the key to serve the model with a 16-bit KV cache",
        )
    return caches[stated]


def _pattern(name: str) -> str:
    """Turn a name with `*` into a pattern for the module and all modules below it."""
    return wildcard(name).removesuffix("$") + r"(?:\..*)?$"


def _names(value: Any, where: str) -> list[str]:
    if (
        not isinstance(value, list)
        or len(value) > MAX_RULES
        or not all(isinstance(name, str) and name for name in value)
    ):
        raise block_error(where, f"expected a list of names and patterns, found {value!r:.80}")
    return value


def _producer(block: Mapping[str, Any]) -> str:
    producer = block.get("producer")
    version = producer.get("version", "") if isinstance(producer, dict) else ""
    return f"modelopt:{version}"
