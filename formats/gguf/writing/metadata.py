"""Convert config.json to the metadata of a GGUF file: the inverse of formats/gguf/config.py.

Needs no torch.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from formats.architecture.family import Family
from formats.architecture.stored_form.config import canonical_config
from formats.errors import COPY_CONFIG, CheckpointError
from formats.gguf.architectures.architecture import Architecture
from formats.gguf.architectures.divisors import ORIGINAL, llama3_divisors
from formats.gguf.architectures.parts import FREQUENCIES
from formats.gguf.architectures.table import ARCHITECTURES
from formats.gguf.config import make_config
from formats.gguf.container import read_gguf
from formats.gguf.metadata import Metadata
from formats.gguf.rope import LONG, SHORT
from formats.gguf.writing.container_writer import Value
from formats.gguf.writing.latent import latent_metadata

REMEDY = "write another format"
# Keys of config.json that may differ: the file has another name or form for them.
NOT_COMPARED = {
    *("architectures", "model_type", "dtype", "hidden_act", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "rope_theta", "rope_scaling"),
    *("quantization_config", "sliding_window", "partial_rotary_factor", ORIGINAL),
    # Falcon and GPT-BigCode: these follow from the number of KV heads
    *("multi_query", "new_decoder_architecture", "num_kv_heads"),
    # layers that only draft are not written
    "num_nextn_predict_layers",
}
WHOLE = ("expert_count", "expert_used_count", "expert_shared_count", "leading_dense_block_count")
WHOLE += ("expert_group_count", "expert_group_used_count", "attention.kv_lora_rank")
WHOLE += ("interleave_moe_layer_step", "ssm.conv_kernel", "ssm.state_size", "ssm.group_count")
WHOLE += ("ssm.time_step_rank", "shortconv.l_cache", "kda.head_dim", "moe_latent_size")
WHOLE += ("attention.indexer.head_count", "attention.indexer.top_k")
WHOLE += ("embedding_length_per_layer_input", "attention.shared_kv_layers")
WHOLE += ("altup.num_inputs", "altup.active_idx")


GELUS = ("gelu", "gelu_new", "gelu_pytorch_tanh")  # llama.cpp has one GELU for all


def architecture_of(family: Family, config: Mapping[str, Any]) -> Architecture:
    """Return the architecture row that a family is written as.

    Raises CheckpointError without one.
    """
    for row in ARCHITECTURES.values():
        names = (row.family, row.with_experts, row.with_window, row.with_sigmoid)
        names += (row.with_shared, row.without_experts, *row.also)
        if family.architecture in names:
            return row.variant_of_config(config)
    subject = f"architecture {family.architecture}"
    raise CheckpointError(subject, "cannot be written as GGUF", REMEDY)


def head_width(config: Mapping[str, Any]) -> int:
    """Return the width of a head."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def num_experts(config: Mapping[str, Any]) -> int | None:
    """Return the number of routed experts; None: there are none."""
    keys = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((config[key] for key in keys if config.get(key)), None)


def metadata_of(
    config: Mapping[str, Any],
    family: Family,
    row: Architecture,
    name: str,
    *,
    is_split: bool = True,
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Return the metadata except the tokenizer's, and tensors of frequency divisors by name.

    `is_split` is that of latent_metadata. Raises CheckpointError if GGUF cannot express a key of
    config.json.
    """
    heads, width = config["num_attention_heads"], head_width(config)
    _check_activation(config, family, row)
    for key, needed in row.needs.items():
        if config.get(key, needed) != needed:
            raise CheckpointError(
                f"config.json {key}",
                f"is {config[key]!r:.60}, but {row.name} in GGUF has {needed!r:.60}",
                REMEDY,
            )
    if row.needs_square_output and heads * width != config["hidden_size"]:
        raise CheckpointError(
            "config.json head_dim",
            f"expected {config['hidden_size'] // heads} in {row.name}, found {width}",
            REMEDY,
        )
    kv_heads = config.get("num_key_value_heads") or heads
    if row.needs_all_kv_heads and kv_heads != heads:
        raise CheckpointError(
            "config.json num_key_value_heads",
            f"expected {heads}, as many as heads, in {row.name}, found {kv_heads}",
            REMEDY,
        )
    own: dict[str, Any] = {
        "block_count": _u32(config["num_hidden_layers"]),
        "context_length": _u32(config["max_position_embeddings"]),
        "embedding_length": _u32(config["hidden_size"]),
        "feed_forward_length": _u32(config[family.inner_key]),
        "attention.head_count": _u32(heads),
        "attention.head_count_kv": _u32(config.get("num_key_value_heads") or heads),
        "attention.key_length": _u32(width),
        "attention.value_length": _u32(config[row.value_width] if row.value_width else width),
        "vocab_size": _u32(config["vocab_size"]),
    }
    if not row.has_attention:
        del own["attention.key_length"], own["attention.value_length"]
    kind = "rms_epsilon" if family.norm_kind == "rms" else "epsilon"
    eps = config.get(family.norm_eps_key, 1e-5) if family.norm_eps_key else 1e-5
    own[f"attention.layer_norm_{kind}"] = _f32(eps)
    count = num_experts(config) if family.experts else None
    for key, theirs in row.keys.items():
        value = count if theirs == "expert_count" else config.get(key)
        if theirs == "expert_used_count" and count is None:
            continue
        if value is not None:
            own[theirs] = _u32(value) if theirs in WHOLE else _stated(theirs, value)
    for theirs, value in row.constants.items():
        if value is not None:
            own[theirs] = _typed(value)
    own |= _windows(config, row)
    rope, divisors = {}, {}
    if row.rope_metadata is not None:
        rope, divisors = row.rope_metadata(config)
    elif family.rotates(config):
        rope, divisors = _rope(config, width, row)
    own |= rope
    if row.is_latent:
        own |= latent_metadata(config, row, is_split=is_split and not row.joins_kv_b)
    if row.more_metadata is not None:
        own |= {key: _typed(value) for key, value in row.more_metadata(config).items()}
    general = {
        "general.architecture": row.name,
        "general.type": "model",
        "general.name": name,
        "general.quantization_version": _u32(2),
    }
    return general | {f"{row.name}.{key}": value for key, value in own.items()}, divisors


def check_states(file: Path, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the metadata of a file give another config.json than `config`."""
    metadata = Metadata(read_gguf(file))
    read = canonical_config(make_config(metadata))
    left_out = {*NOT_COMPARED, *metadata.architecture.uncompared}
    layers = range(config["num_hidden_layers"])
    interval = read.get("no_rope_layer_interval")
    if interval:
        read["no_rope_layers"] = [int((i + 1) % interval != 0) for i in layers]
    for key in sorted(read.keys() & config.keys() - left_out):
        if config[key] is not None and config[key] != read[key]:
            raise CheckpointError(
                f"config.json {key}",
                f"is {config[key]!r:.60}, but {read['model_type']} in GGUF has {read[key]!r:.60}",
                REMEDY,
            )


def _check_activation(config: Mapping[str, Any], family: Family, row: Architecture) -> None:
    """Raise CheckpointError if the activation differs from the architecture's only one."""
    usual = family.activations[0]
    found = config.get(family.activation_key, usual) if family.activation_key else usual
    if found != usual and not {found, usual} <= set(GELUS):
        raise CheckpointError(
            f"config.json {family.activation_key}",
            f"{row.name} has {usual!r} in GGUF, found {found!r:.40}",
            REMEDY,
        )


def _u32(value: int) -> Value:
    return Value(type="u32", value=value)


def _f32(value: float) -> Value:
    return Value(type="f32", value=float(value))


def _typed(value: Any) -> Any:
    """Return a number, or a list of numbers, with its GGUF type; whole numbers become u32."""
    if isinstance(value, Value | str):
        return value
    first = value[0] if isinstance(value, list) else value
    kinds = {bool: "bool", int: "u32", float: "f32"}
    return Value(type=kinds[type(first)], value=value)


def _stated(key: str, value: Any) -> Value:
    if isinstance(value, bool):
        return Value(type="bool", value=value)
    return _u32(value) if key.endswith("_length") else _f32(value)


def _windows(config: Mapping[str, Any], row: Architecture) -> dict[str, Any]:
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if config.get("use_sliding_window") is False or not window:
        return {}
    if isinstance(kinds, list) and "sliding_attention" not in kinds:
        return {}
    if not row.window:
        raise CheckpointError(
            "config.json sliding_window", f"{row.name} has no windows in GGUF", REMEDY
        )
    found = {"attention.sliding_window": _u32(window)}
    if row.window == "pattern" and isinstance(kinds, list):
        slides = [kind == "sliding_attention" for kind in kinds]
        found["attention.sliding_window_pattern"] = Value(type="bool", value=slides)
    return found


def _rope(
    config: Mapping[str, Any], width: int, row: Architecture
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    stated = config.get("rope_parameters") or {}
    full = stated.get("full_attention", stated)
    scaling = {
        **full,
        **(config.get("rope_scaling") or {}),
    }  # the older key, rope_scaling, takes precedence
    for usual, own in row.rope_names.items():
        config = {usual: config[own], **config} if own in config else config
    theta = scaling.get("rope_theta", config.get("rope_theta", row.default_theta))
    if theta is None:
        raise CheckpointError("config.json rope_theta", "is not stated", COPY_CONFIG)
    part = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    rotated = int(width * (row.default_part if part is None else part))
    if scaling.get("rope_type") == "dynamic" and scaling.get("alpha"):  # one theta for all lengths
        theta *= scaling["alpha"] ** (rotated / (rotated - 2))
        scaling["rope_type"] = "default"
    keys: dict[str, Any] = {
        "rope.freq_base": _f32(theta),
        "rope.dimension_count": _u32(rotated),
    }
    local = stated.get("sliding_attention", {}).get("rope_theta")
    local = local or config.get("rope_local_base_freq")
    if local:
        keys["rope.freq_base_swa"] = _f32(local)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return keys, {}
    factor, original = scaling.get("factor"), scaling.get(ORIGINAL) or config.get(ORIGINAL)
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        divisors = llama3_divisors(theta, rotated, factor, low, high, original)
        return keys, {FREQUENCIES: divisors}
    if kind == "longrope":
        return keys | _long_rope(config, scaling, original), {
            LONG: scaling["long_factor"],
            SHORT: scaling["short_factor"],
        }
    if kind not in ("linear", "yarn"):
        problem = f"{kind!r} cannot be stored in GGUF"
        raise CheckpointError("config.json rope_scaling", problem, REMEDY)
    keys["rope.scaling.type"] = kind
    keys["rope.scaling.factor"] = _f32(factor)
    if original:
        keys["rope.scaling.original_context_length"] = _u32(original)
    for theirs, name in (
        ("rope.scaling.yarn_attn_factor", "attention_factor"),
        ("rope.scaling.yarn_beta_fast", "beta_fast"),
        ("rope.scaling.yarn_beta_slow", "beta_slow"),
    ):
        if kind == "yarn" and scaling.get(name) is not None:
            keys[theirs] = _f32(scaling[name])
    return keys, {}


def _long_rope(
    config: Mapping[str, Any], scaling: Mapping[str, Any], original: int | None
) -> dict[str, Any]:
    """Return the metadata of LongRoPE.

    They are the length up to which the short factors are used, and the factor of cosines and sines.
    """
    length = config["max_position_embeddings"]
    original = original or length
    attention, factor = scaling.get("attention_factor"), scaling.get("factor") or length / original
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {
        "rope.scaling.original_context_length": _u32(original),
        "rope.scaling.attn_factor": _f32(attention),
    }
