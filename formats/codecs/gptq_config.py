"""The keys of a GPTQ block, as AutoGPTQ, GPTQModel and AutoRound write them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from formats.codecs.config_fields import BLOCK, ConfigFields
from formats.codecs.gptq import zeros_rule
from formats.errors import COPY_BLOCK, CheckpointError, block_error, unsupported_error
from formats.rules import Rule, exact_patterns
from formats.scheme import ActivationSpec, QuantSpec, Scheme, checked_group_size

REQUIRED_KEYS = ("bits", "group_size", "desc_act", "sym")
BITS = (2, 3, 4, 8)
LABELS = {"gptq": "v1", "gptq_v2": "v2"}
MAX_RULES = 10_000
# This project's key. Other servers ignore it and run the same file with 16-bit activations.
OWN_KEY = "qserve"
DYNAMIC_INT8 = {"act": {"bits": 8, "dynamic": True, "per": "token"}}


def stored(scheme: Scheme) -> Scheme:
    """Return the scheme as it reads back: unchanged."""
    return scheme


def read(block: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a QuantConfig. Raises CheckpointError, naming the key."""
    for key in REQUIRED_KEYS:
        if key not in block:
            if key == "desc_act":
                continue
            raise block_error(f"{BLOCK}.{key}", "missing")
    label = block.get("checkpoint_format") or block.get("format") or "gptq"
    if not isinstance(label, str) or label not in LABELS:
        raise block_error(
            f"{BLOCK}.checkpoint_format", f"expected one of {', '.join(LABELS)}, found {label!r}"
        )
    if block.get("pack_dtype", "int32") not in ("int32", None):
        raise unsupported_error(
            f"{BLOCK}.pack_dtype", f"expected 'int32', found {block['pack_dtype']!r}"
        )
    spec = _spec(block, BLOCK)
    scheme = Scheme(weight=spec, activation=_activation(block))
    rules = _dynamic_rules(block.get("dynamic"), scheme)
    rules += _block_rules(block.get("modules_in_block_to_quantize"), scheme)
    head = block.get("lm_head", False)
    if not isinstance(head, bool | None):
        raise block_error(f"{BLOCK}.lm_head", f"expected true or false, found {head!r}")
    meta = block.get("meta")
    quantizer = meta.get("quantizer", "") if isinstance(meta, dict) else ""
    return {
        "scheme": scheme,
        "rules": tuple(rules),
        "zeros": LABELS[label],
        "lm_head": bool(head),
        "act_order": bool(
            block.get("desc_act", True)
        ),  # without the key, only g_idx shows the order
        "quantizer": str(
            quantizer[0] if isinstance(quantizer, list) and quantizer else quantizer or ""
        ),
    }


def write(config: ConfigFields) -> dict[str, Any]:
    """Return the block for config.json."""
    spec = config.scheme.weight
    label = next(label for label, zeros in LABELS.items() if zeros == config.zeros)
    block = {
        "quant_method": "gptq",
        "bits": spec.bits,
        "group_size": spec.group_size,
        "desc_act": config.act_order,
        "sym": spec.symmetric,
        "lm_head": config.lm_head,
        "checkpoint_format": label,
        "format": label,
        "pack_dtype": "int32",
        "true_sequential": False,
        "meta": {"quantizer": [config.quantizer]} if config.quantizer else {},
    }
    if config.rules:
        block["dynamic"] = {}
        for rule in config.rules:
            if rule.scheme is None:
                block["dynamic"][f"-:{rule.text}"] = {}
            else:
                own = rule.scheme.weight
                block["dynamic"][f"+:{rule.text}"] = {
                    "bits": own.bits,
                    "group_size": own.group_size,
                    "sym": own.symmetric,
                    "desc_act": config.act_order,
                }
    if config.scheme.activation is not None:
        block[OWN_KEY] = DYNAMIC_INT8
    return block


def rules_for(
    schemes: Mapping[str, Scheme | None], others: Mapping[str, Scheme | None]
) -> tuple[Rule, ...]:
    """Return `dynamic` entries for the modules that differ from the rest."""
    activations = {scheme.activation for scheme in schemes.values() if scheme is not None}
    if len(activations) > 1:
        raise CheckpointError(
            "gptq",
            "expected one activation type for all modules, found several",
            "use the same activations for all modules, or `--format compressed-tensors`",
        )
    versions = {zeros_rule(scheme.weight) for scheme in schemes.values() if scheme is not None}
    if len(versions) > 1:
        raise CheckpointError(
            "gptq",
            "has one zeros label for all modules, but symmetric and asymmetric modules need"
            " different ones",
            "use only symmetric or only asymmetric schemes, or `--format compressed-tensors`",
        )
    return tuple(
        Rule(kind="regex", text=text, scheme=scheme)
        for text, scheme in exact_patterns(schemes, others)
    )


def _spec(values: Mapping[str, Any], where: str) -> QuantSpec:
    bits, symmetric = values["bits"], values["sym"]
    if bits not in BITS or isinstance(bits, bool | float):
        raise unsupported_error(f"{where}.bits", f"expected one of {BITS}, found {bits!r}")
    if not isinstance(symmetric, bool):
        raise block_error(f"{where}.sym", f"expected true or false, found {symmetric!r}")
    group_size = values["group_size"]
    if isinstance(group_size, bool) or not isinstance(group_size, int):
        raise block_error(f"{where}.group_size", f"expected a number, found {group_size!r}")
    return QuantSpec(
        bits=bits,
        symmetric=symmetric,
        group_size=checked_group_size(group_size, f"{where}.group_size: group size", COPY_BLOCK),
    )


def _activation(block: dict[str, Any]) -> ActivationSpec | None:
    own = block.get(OWN_KEY)
    if own is None:
        return None
    if own != DYNAMIC_INT8:
        raise block_error(f"{BLOCK}.{OWN_KEY}", f"expected {DYNAMIC_INT8}, found {own!r}")
    return ActivationSpec()


def _dynamic_rules(dynamic: Any, scheme: Scheme) -> list[Rule]:
    """Read `dynamic`: "+:regex" or "regex" overrides a module, "-:regex" skips it."""
    if dynamic is None:
        return []
    if not isinstance(dynamic, dict) or len(dynamic) > MAX_RULES:
        raise block_error(f"{BLOCK}.dynamic", f"expected an object, found {type(dynamic)}")
    rules = []
    for key, values in dynamic.items():
        text = key.removeprefix("+:").removeprefix("-:")
        if key.startswith("-:") or values is False:
            rules.append(Rule(kind="regex", text=text, scheme=None))
            continue
        if not isinstance(values, dict):
            raise block_error(
                f"{BLOCK}.dynamic[{key[:80]!r}]", f"expected an object, found {values!r}"
            )
        base = {
            "bits": scheme.weight.bits,
            "sym": scheme.weight.symmetric,
            "group_size": scheme.weight.group_size,
        }
        weight = _spec({**base, **values}, f"{BLOCK}.dynamic[{key[:80]!r}]")
        rules.append(Rule(kind="regex", text=text, scheme=replace(scheme, weight=weight)))
    return rules


def _block_rules(listed: Any, scheme: Scheme) -> list[Rule]:
    """Read `modules_in_block_to_quantize`: names, or lists of names; all others are float."""
    if listed is None or listed == []:
        return []
    names = []
    for item in listed if isinstance(listed, list) else [listed]:
        names += item if isinstance(item, list) else [item]
    if not all(isinstance(name, str) and name for name in names) or len(names) > MAX_RULES:
        raise block_error(
            f"{BLOCK}.modules_in_block_to_quantize",
            f"expected names, or lists of names, found {listed!r:.80}",
        )
    rules = [Rule(kind="contains", text=name, scheme=scheme) for name in names]
    return [*rules, Rule(kind="all", scheme=None)]
