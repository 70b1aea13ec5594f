"""Checks of config.json other than its quantization block.

The rules are those of transformers 5.23, which vLLM, SGLang and this project also use.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from formats.architecture.family import Family
from formats.architecture.rope_types import ROPE_DEFAULT, ROPE_TYPES
from formats.architecture.sizes import check_heads, factors_not_finite
from formats.architecture.variant_check import check_variant
from formats.checkpoint import CONFIG
from formats.errors import InputError
from formats.families import FAMILIES, checked_family, family_of, known_family
from formats.inspection.findings import Findings

# Without these keys, or Family.inner_key, a reader uses its own defaults, such as 4096.
REQUIRED = (
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
    "num_attention_heads",
)
NUMBERS = (
    *REQUIRED,
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
# activations that transformers knows
SILU = "silu"
ACTIVATIONS = (
    *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python"),
    *("gelu_python_tanh", "gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear"),
    *("mish", "prelu", "quick_gelu", "relu", "relu2", "relu6", "sigmoid", SILU, "sqrtsoftplus"),
    *("swish", "tanh", "xielu"),
)
# torch dtypes, as transformers looks them up
DTYPES = ("bfloat16", "float16", "half", "float32", "float", "float64", "double")
_COPY = "copy it from the model that was quantized"


class Choices(NamedTuple):
    """Choices that other readers may not support although transformers does."""

    activation: str = SILU
    default_activation: str = SILU  # the choice of all models of the family
    refused: str = ""  # why this project does not compute the variant


def check_config(config: Mapping[str, Any], findings: Findings) -> Choices:
    """Report problems that make transformers, and so every server, refuse config.json."""
    if not isinstance(config.get("model_type"), str):
        found = f"found {config['model_type']!r:.80}" if "model_type" in config else "found none"
        findings.error(f"{CONFIG} model_type", f"expected a name, {found}", "state it")
    family = checked_family(config)
    if family is None:
        _check_type_of_another(config, findings)
    _check_dtype(config, family, findings)
    for key, value in factors_not_finite(config).items():
        findings.error(f"{CONFIG} {key}", f"expected a finite number, found {value}")
    if family is None:
        known = known_family(config)
        if known is not None:
            _check_stated_numbers(config, known.inner_key, findings)
        return Choices(refused=_refused_variant(config))
    for name in (*REQUIRED, family.inner_key):
        if name not in config:
            findings.error(f"{CONFIG} {name}", "is missing", "copy it from the float model")
    for name in (*NUMBERS, family.inner_key):
        value = config.get(name, 1)
        left_out = value is None and name in family.rules.may_be_null
        if (type(value) is not int or value < 1) and not left_out:
            findings.error(
                f"{CONFIG} {name}", f"expected a whole number above 0, found {value!r:.80}"
            )
    _check_heads(config, findings)
    epsilon = config.get(family.norm_eps_key, 1e-6)
    if type(epsilon) is not float or not 0 <= epsilon < math.inf:
        findings.error(
            f"{CONFIG} {family.norm_eps_key}",
            f"expected a number such as 1e-06, found {epsilon!r:.80}",
        )
    tied = config.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        findings.error(
            f"{CONFIG} tie_word_embeddings", f"expected true or false, found {tied!r:.80}"
        )
    _check_rope(config, findings)
    return Choices(
        activation=_activation(config, family, findings),
        default_activation=family.activations[0],
        refused=_refused_variant(config),
    )


def _check_stated_numbers(config: Mapping[str, Any], inner_key: str, findings: Findings) -> None:
    """Report sizes of 0 or less; a family without config rules may leave out any size."""
    for name in (*NUMBERS, inner_key):
        value = config.get(name, 1)
        if type(value) is int and value < 1:
            findings.error(f"{CONFIG} {name}", f"expected a whole number above 0, found {value}")


def _refused_variant(config: Mapping[str, Any]) -> str:
    """Return why this project does not compute the variant that config.json states, or ""."""
    family = family_of(config)
    try:
        if family is not None:
            check_variant(family.variant(config), config)
    except InputError as error:
        return f"{error.subject}: {error.problem}"
    return ""


def _check_heads(config: Mapping[str, Any], findings: Findings) -> None:
    heads, kv_heads = (config.get(f"num_{name}_heads") for name in ("attention", "key_value"))
    if type(heads) is int and type(kv_heads) is int and min(heads, kv_heads) > 0:
        try:
            check_heads(heads, kv_heads)
        except InputError as error:
            findings.error(error.subject, error.problem, error.remedy)


def _check_type_of_another(config: Mapping[str, Any], findings: Findings) -> None:
    """Report a model_type of another family.

    transformers chooses the model by model_type, other programs by the architecture.
    """
    found, names = config.get("model_type"), config.get("architectures")
    for family in FAMILIES.values():
        if names == [family.architecture] and isinstance(found, str) and found != family.model_type:
            findings.error(
                f"{CONFIG} model_type",
                f"{found!r:.80} is not that of {family.architecture}",
                f"state {family.model_type!r}",
            )


def _check_dtype(config: Mapping[str, Any], family: Family | None, findings: Findings) -> None:
    """Check the dtype, newer key first. Readers allocate tensors in it."""
    key = "dtype" if config.get("dtype") is not None else "torch_dtype"
    value = config.get(key)
    composite = isinstance(value, dict) and family is None
    if value is not None and not composite and value not in DTYPES:
        findings.error(
            f"{CONFIG} {key}",
            f"expected {', '.join(DTYPES[:2])} or float32, found {value!r:.80}",
            "state the dtype of the norms and embeddings",
        )


def _activation(config: Mapping[str, Any], family: Family, findings: Findings) -> str:
    usual = family.activations[0]
    name = config.get(family.activation_key, usual)
    if name in ACTIVATIONS:
        return name
    findings.error(
        f"{CONFIG} {family.activation_key}",
        f"unknown: {name!r:.80}; all models of this family have {usual}",
        "copy config.json from the model that was quantized",
    )
    return usual


def _check_rope(config: Mapping[str, Any], findings: Findings) -> None:
    """Check the rotary embedding and its parameters."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(key)
    rope = {} if rope is None else rope
    if not isinstance(rope, dict):
        findings.error(f"{CONFIG} {key}", f"expected an object, found {rope!r:.80}", _COPY)
        return
    of_types = {f"{key}.{name}": value for name, value in rope.items() if isinstance(value, dict)}
    for subject, value in (of_types or {key: rope}).items():
        _check_type_of_rope(subject, value, config, findings)


def _check_type_of_rope(
    key: str, rope: Mapping[str, Any], config: Mapping[str, Any], findings: Findings
) -> None:
    theta_key = f"{key}.rope_theta" if "rope_theta" in rope else "rope_theta"
    theta = rope.get("rope_theta", config.get("rope_theta", 1.0))
    if not _is_positive(theta):
        findings.error(
            f"{CONFIG} {theta_key}", f"expected a number above 0, found {theta!r:.80}", _COPY
        )
    kind = rope.get("rope_type", rope.get("type", ROPE_DEFAULT))
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        findings.error(
            f"{CONFIG} {key}.{'rope_type' if 'rope_type' in rope else 'type'}",
            f"expected one of {', '.join(ROPE_TYPES)}, found {kind!r:.80}",
            _COPY,
        )
        return
    numbers, lists = ROPE_TYPES[kind].numbers, ROPE_TYPES[kind].lists
    for name in (*numbers, *lists):
        value = rope.get(name)
        listed = name in lists and isinstance(value, list) and len(value) > 0
        if not all(_is_positive(each) for each in (value if listed else [value])):
            wanted = "a list of numbers" if name in lists else "a number"
            found = f"found {value!r:.80}" if name in rope else "it is missing"
            findings.error(f"{CONFIG} {key}.{name}", f"expected {wanted} above 0, {found}", _COPY)


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf
