"""The keys of a compressed-tensors block."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from formats.codecs.compressed_tensors import (
    FLOAT,
    FP4_LAYOUTS,
    INTEGER,
    MXFP6_LAYOUT,
    MXFP8_LAYOUT,
    PACKED,
    PACKED_BITS,
    layout_of,
)
from formats.codecs.config_fields import BLOCK, EMBEDDING, ConfigFields
from formats.codecs.kv_cache import KEY, read_kv_scheme, write_kv_scheme
from formats.codecs.microscaling import MXFP6
from formats.errors import COPY_BLOCK, CheckpointError, block_error, unsupported_error
from formats.rules import MAX_RULES, Rule, exact_patterns
from formats.scheme import (
    ALL,
    CHANNEL,
    FP4_TYPES,
    MICROSCALED,
    MXFP8,
    ActivationSpec,
    QuantSpec,
    Scheme,
    checked_group_size,
    microscaled_inputs,
)

VERSION = "0.17.0"  # version of the library's schema that the block follows
KNOWN_LAYOUTS = (
    *(PACKED, INTEGER, FLOAT, *FP4_LAYOUTS.values(), MXFP6_LAYOUT, MXFP8_LAYOUT),
    *("naive-quantized", "mixed-precision", "dense"),
)
# Values of `actorder`. IN_ORDER: the file groups adjacent inputs, whatever order the solver used.
# REORDERED: weight_g_idx states each input's group ("dynamic" is an alias).
IN_ORDER = (None, False, "weight", "static")
REORDERED = ("group", "dynamic", True)
# Locations of a transform that is folded into the stored weights, with no work at run time.
OFFLINE_LOCATIONS = ("weight_input", "weight_output")


def stored(scheme: Scheme) -> Scheme:
    """Return the scheme as it reads back: inputs of MICROSCALED stay in 16 bits."""
    return scheme if microscaled_inputs(scheme) is None else replace(scheme, activation=None)


def unrounded(schemes: Iterable[Scheme | None]) -> str:
    """Describe the inputs of MICROSCALED among schemes that are written; "" if there are none.

    Raises CheckpointError if some linears with weights of one kind have such inputs and others do
    not.
    """
    found = {scheme for scheme in schemes if scheme is not None}
    micro = {scheme for scheme in found if microscaled_inputs(scheme) is not None}
    mixed = next((each for each in micro if stored(each) in found), None)
    if mixed is not None:
        raise CheckpointError(
            f"scheme {mixed}",
            f"cannot be stored in one checkpoint with {stored(mixed)}",
            "use only one of them",
        )
    return next((f"{scheme.activation.bits}-bit float" for scheme in micro), "")


def read(block: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a QuantConfig. Raises CheckpointError, naming the key."""
    _check_layout(block.get("format"), f"{BLOCK}.format")
    if block.get("sparsity_config") and _is_used(block["sparsity_config"]):
        raise CheckpointError(
            f"{BLOCK}.sparsity_config", "is not supported", "requantize without it"
        )
    _check_transforms(block.get("transform_config"), f"{BLOCK}.transform_config")
    kv_cache, per_head = read_kv_scheme(block.get(KEY), f"{BLOCK}.{KEY}")
    groups = block.get("config_groups")
    if not groups and kv_cache is not None:
        return {"scheme": None, "rules": (), "kv_cache": kv_cache, "kv_per_head": per_head}
    if not isinstance(groups, dict) or not groups:
        raise block_error(
            f"{BLOCK}.config_groups",
            f"expected an object with a group or more, found {groups!r:.80}",
        )
    ignored = [_target(text, None) for text in _names(block.get("ignore"), f"{BLOCK}.ignore")]
    named: list[Rule] = []
    of_class: list[Scheme] = []
    act_order, unrounded = False, ""
    for key, group in groups.items():
        where = f"{BLOCK}.config_groups.{key}"
        if not isinstance(group, dict):
            raise block_error(where, f"expected an object, found {type(group).__name__}")
        _check_layout(group.get("format"), f"{where}.format")
        if _is_of_attention(group):  # kv_cache_scheme repeats what the group says
            continue
        if group.get("output_activations") is not None:
            raise unsupported_error(f"{where}.output_activations", "is not supported")
        if group.get("weights") is None:
            raise block_error(f"{where}.weights", "missing")
        weight = _weight(group["weights"], f"{where}.weights")
        _check_fp4(group.get("format") or block.get("format"), weight, where)
        inputs, at = group.get("input_activations"), f"{where}.input_activations"
        reason = _unrounded(inputs, weight, at)
        scheme = Scheme(weight=weight, activation=None if reason else _activation(inputs, at))
        unrounded = unrounded or reason
        act_order = act_order or _actorder(group["weights"]) in REORDERED
        for target in _names(group.get("targets"), f"{where}.targets"):
            if target == "Linear":
                of_class.append(scheme)
            elif target == "Embedding":
                named.append(Rule(kind="name", text=EMBEDDING, scheme=scheme))
            else:
                named.append(_target(target, scheme))
    if not of_class and not named and kv_cache is not None:
        return {"scheme": None, "rules": (), "kv_cache": kv_cache, "kv_per_head": per_head}
    rules = (*ignored, *named)
    if not of_class:
        rules = (*rules, Rule(kind="all", scheme=None))
    main = of_class[0] if of_class else named[0].scheme if named else None
    if main is None:
        raise block_error(f"{BLOCK}.config_groups", "has no targets")
    return {
        "scheme": main,
        "rules": tuple(rule for rule in rules if rule != _HEAD_IGNORED),
        "lm_head": _HEAD_IGNORED not in rules,
        "act_order": act_order,
        "kv_cache": kv_cache,
        "kv_per_head": per_head,
        "unrounded_inputs": unrounded,
    }


def write(config: ConfigFields) -> dict[str, Any]:
    """Return the block for config.json."""
    targets = {config.scheme: ["Linear"]}
    for rule in config.rules:
        if rule.scheme is not None:
            targets.setdefault(rule.scheme, []).append(_text(rule))
    layouts = {layout_of(scheme) for scheme in targets}
    return {
        "quant_method": "compressed-tensors",
        "version": VERSION,
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{number}": {
                "targets": names,
                "weights": _weight_keys(scheme.weight),
                "input_activations": _activation_keys(
                    _MICROSCALED_INPUTS.get(scheme.weight)
                    if config.unrounded_inputs and scheme.activation is None
                    else scheme.activation
                ),
                "output_activations": None,
                "format": layout_of(scheme),
            }
            for number, (scheme, names) in enumerate(targets.items())
        },
        "ignore": ["lm_head"] * (not config.lm_head)
        + [_text(rule) for rule in config.rules if rule.scheme is None],
        KEY: write_kv_scheme(config.kv_cache, config.kv_per_head),
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
    }


def rules_for(
    schemes: Mapping[str, Scheme | None], others: Mapping[str, Scheme | None]
) -> tuple[Rule, ...]:
    """Return rules for ignored modules and further groups.

    "Linear" excludes embeddings, which are therefore named.
    """
    embedding = schemes.get(EMBEDDING)
    schemes, others = (
        {name: scheme for name, scheme in each.items() if name != EMBEDDING}
        for each in (schemes, others)
    )
    rules = [
        Rule(kind="regex", text=text, scheme=scheme)
        for text, scheme in exact_patterns(schemes, others)
    ]
    if schemes.get(_HEAD) is not None and _HEAD not in others:
        # SGLang treats a head as quantized only if a target names it.
        rules.append(Rule(kind="name", text=_HEAD, scheme=schemes[_HEAD]))
    if embedding is not None:
        rules.append(Rule(kind="name", text=EMBEDDING, scheme=embedding))
    return tuple(sorted(rules, key=lambda rule: rule.scheme is not None))


def _weight_keys(spec: QuantSpec) -> dict[str, Any]:
    strategy, group_size, block = "group", spec.group_size, None
    if spec.rows == ALL:
        strategy, group_size = "tensor", None
    elif spec.rows > 1:
        strategy, group_size, block = "block", None, [spec.rows, spec.group_size]
    elif spec.group_size == CHANNEL:
        strategy, group_size = "channel", None
    if spec.type == "nvfp4":
        strategy = "tensor_group"
    # the library recognizes MXFP8 by this key
    scale_dtype = {"scale_dtype": "torch.uint8"} if spec == MXFP8 else {}
    return {
        **scale_dtype,
        "num_bits": spec.bits,
        "type": "int" if spec.type == "int" else "float",
        "symmetric": spec.symmetric,
        "strategy": strategy,
        "group_size": group_size,
        "block_structure": block,
        "dynamic": False,
        "actorder": None,
    }


def _activation_keys(spec: ActivationSpec | None) -> dict[str, Any] | None:
    if spec is None:
        return None
    if spec in _MICROSCALED_INPUTS.values():
        return {
            "num_bits": spec.bits,
            "type": "float",
            "symmetric": True,
            "strategy": "group" if spec.dynamic else "tensor_group",
            "group_size": spec.group_size,
            "dynamic": True if spec.dynamic else "local",
            "scale_dtype": "torch.uint8" if spec.dynamic else "torch.float8_e4m3fn",
        }
    return {
        "num_bits": 8,
        "type": spec.type,
        "symmetric": True,
        "strategy": spec.per,
        "group_size": spec.group_size if spec.per == "group" else None,
        "dynamic": spec.dynamic,
    }


def _weight(args: Any, where: str) -> QuantSpec:
    bits, kind, symmetric = _common(args, where)
    if args.get("dynamic"):
        raise block_error(f"{where}.dynamic", "expected false: scales of weights are static")
    if _actorder(args) not in (*IN_ORDER, *REORDERED):
        raise unsupported_error(f"{where}.actorder", f"unknown: {args['actorder']!r}")
    fp4 = _fp4_type(args, bits, kind, symmetric)
    if fp4 is not None:
        return QuantSpec(bits=4, symmetric=True, group_size=FP4_TYPES[fp4], type=fp4)
    if (bits, kind, symmetric, args.get("group_size")) == (6, "float", True, MXFP6.group_size):
        return MXFP6
    if kind == "float" and (bits, symmetric) != (8, True):
        raise unsupported_error(
            f"{where}.num_bits", f"expected 8 symmetric float bits, found {bits}"
        )
    if kind == "int" and bits not in PACKED_BITS:
        raise unsupported_error(f"{where}.num_bits", f"expected 2 to 8, found {bits!r}")
    strategy, rows, group_size = args.get("strategy"), 1, CHANNEL
    if strategy is None:
        strategy = "tensor" if args.get("group_size") is None else "group"
    if strategy == "group":
        group_size = checked_group_size(
            args.get("group_size"), f"{where}.group_size: group size", COPY_BLOCK
        )
    elif strategy == "tensor":
        rows = ALL if kind == "float" else 1  # for integer codes, the scale is repeated per row
    elif strategy == "block":
        block = args.get("block_structure")
        if isinstance(block, str):
            block = [int(part) if part.isdecimal() else 0 for part in block.split("x")]
        if (
            kind != "float"
            or not isinstance(block, list)
            or len(block) != 2
            or not all(type(part) is int and 8 <= part <= 2**20 for part in block)
        ):
            raise block_error(
                f"{where}.block_structure", f"expected [128, 128] of float weights, found {block!r}"
            )
        rows, group_size = block
    elif strategy != "channel":
        raise unsupported_error(f"{where}.strategy", f"not supported: {strategy!r}")
    return QuantSpec(bits=bits, symmetric=symmetric, group_size=group_size, rows=rows, type=kind)


def _fp4_type(args: dict[str, Any], bits: int, kind: str, symmetric: bool) -> str | None:
    """Return "mxfp4" or "nvfp4", decided by group size and strategy as in the library."""
    if (bits, kind, symmetric) != (4, "float", True):
        return None
    strategies = {"mxfp4": "group", "nvfp4": "tensor_group"}
    for name, strategy in strategies.items():
        if args.get("group_size") == FP4_TYPES[name] and args.get("strategy") == strategy:
            return name
    return None


def _unrounded(args: Any, weight: QuantSpec, where: str) -> str:
    """Describe input rounding that no kernel here does; such inputs stay in 16 bits."""
    if args is None:
        return ""
    if weight.type in FP4_TYPES:
        return f"{args.get('num_bits', 8)}-bit float" if isinstance(args, dict) else "of a kind"
    bits, kind, symmetric = _common(args, where)
    if not symmetric:
        return f"asymmetric {bits}-bit {kind}"
    is_mx = weight in (MXFP6, MXFP8) and kind == "float" and args.get("strategy") == "group"
    return f"{bits}-bit {kind} with power-of-two scales" if is_mx else ""


def _is_of_attention(group: dict[str, Any]) -> bool:
    targets = group.get("targets")
    return isinstance(targets, list) and len(targets) == 1 and str(targets[0]).endswith("Attention")


def _check_fp4(layout: Any, weight: QuantSpec, where: str) -> None:
    """Raise CheckpointError if a layout of 4-bit floating point contains other weights."""
    if layout in FP4_LAYOUTS.values() and FP4_LAYOUTS.get(weight.type) != layout:
        found = Scheme(weight=weight)
        raise block_error(f"{where}.format", f"is {layout}, but its weights are {found}")


def _activation(args: Any, where: str) -> ActivationSpec | None:
    if args is None:
        return None
    bits, kind, symmetric = _common(args, where)
    if not symmetric or (bits != 8 and (bits, kind) != (4, "int")):
        raise unsupported_error(
            where,
            "expected 8 symmetric bits, or 4 of integers,"
            f" found {bits} bits, symmetric {symmetric}",
        )
    dynamic = args.get("dynamic", False)
    strategy = args.get("strategy") or ("token" if dynamic else "tensor")
    if not isinstance(dynamic, bool) or strategy not in ("token", "tensor", "group"):
        raise unsupported_error(where, f"not supported: {strategy!r}, dynamic {dynamic!r}")
    if not dynamic and strategy != "tensor":
        raise unsupported_error(where, f"static scales per {strategy} are not supported")
    if strategy == "group":
        group_size = checked_group_size(
            args.get("group_size"), f"{where}.group_size: group size", COPY_BLOCK
        )
        return ActivationSpec(
            bits=bits, type=kind, dynamic=True, per="group", group_size=group_size
        )
    return ActivationSpec(bits=bits, type=kind, dynamic=dynamic, per=strategy)


def _common(args: Any, where: str) -> tuple[int, str, bool]:
    if not isinstance(args, dict):
        raise block_error(where, f"expected an object, found {args!r}")
    bits, kind, symmetric = args.get("num_bits", 8), args.get("type", "int"), args.get("symmetric")
    if type(bits) is not int or not 1 <= bits <= 8:
        raise block_error(f"{where}.num_bits", f"expected 1 to 8, found {bits!r}")
    if kind not in ("int", "float"):
        raise block_error(f"{where}.type", f"expected 'int' or 'float', found {kind!r}")
    if not isinstance(symmetric, bool | None):
        raise block_error(f"{where}.symmetric", f"expected true or false, found {symmetric!r}")
    return bits, kind, symmetric is not False


def _actorder(args: dict[str, Any]) -> Any:
    """Return the value of actorder; the library ignores its case."""
    word = args.get("actorder")
    return word.lower() if isinstance(word, str) else word


def _target(text: str, scheme: Scheme | None) -> Rule:
    if text.startswith("re:"):
        return Rule(kind="regex", text=text.removeprefix("re:"), scheme=scheme)
    return Rule(kind="name", text=text, scheme=scheme)


def _text(rule: Rule) -> str:
    return f"re:{rule.text}" if rule.kind == "regex" else rule.text


def _names(value: Any, where: str) -> list[str]:
    value = [] if value is None else value
    if (
        not isinstance(value, list)
        or len(value) > MAX_RULES
        or not all(isinstance(name, str) for name in value)
    ):
        raise block_error(where, f"expected a list of names and patterns, found {value!r:.80}")
    return value


def _check_layout(layout: Any, where: str) -> None:
    if layout is not None and layout not in KNOWN_LAYOUTS:
        raise unsupported_error(
            where, f"expected one of {', '.join(KNOWN_LAYOUTS)}, found {layout!r}"
        )


def _check_transforms(config: Any, where: str) -> None:
    """Raise CheckpointError if a rotation must be applied at run time.

    Rotations of weights alone are already folded into the stored weights.
    """
    if not config or (isinstance(config, dict) and not any(config.values())):
        return
    groups = config.get("config_groups") if isinstance(config, dict) else None
    if not isinstance(groups, dict):
        raise block_error(where, f"expected an object with config_groups, found {config!r:.80}")
    for name, group in groups.items():
        applied = group.get("apply") if isinstance(group, dict) else None
        if not isinstance(applied, list) or not all(isinstance(each, dict) for each in applied):
            raise block_error(
                f"{where}.config_groups.{name}.apply",
                f"expected a list of objects, found {applied!r:.80}",
            )
        locations = [each.get("location") for each in applied]
        online = [place for place in locations if place not in OFFLINE_LOCATIONS]
        if online:
            raise CheckpointError(
                f"{where}.config_groups.{name}",
                f"{group.get('type', 'a rotation')!r:.40} at {', '.join(map(repr, online)):.80} is"
                " applied at run time, which is not supported",
                f"requantize with rotations at {' and '.join(OFFLINE_LOCATIONS)} alone"
                " (SpinQuant's R1 and R2)",
            )


def _is_used(value: Any) -> bool:
    """Return True for a key that is in use; a "dense" sparsity_config is not."""
    if not isinstance(value, dict):
        return True
    return value.get("format", "") != "dense" and any(value.values())


# Spec of the weights -> how MICROSCALED rounds their inputs
_MICROSCALED_INPUTS = {
    scheme.weight: scheme.activation
    for scheme in MICROSCALED.values()
    if scheme.activation is not None
}
_HEAD = "lm_head"
_HEAD_IGNORED = Rule(kind="name", text=_HEAD, scheme=None)
