"""Families whose code is in the model's folder: keys that this code derives or fixes."""

import math
from collections.abc import Mapping
from typing import Any

from formats.architecture.family import MAX_LAYERS
from formats.architecture.sizes import is_size, layer_numbers
from formats.architecture.stored_form.parts import inner_width, known_sizes
from formats.errors import config_error

TELECHAT_YARN = "telechat3-yarn"  # type of RoPE in TeleChat3's files
_TYPE_KEYS = ("rope_type", "type")
BAICHUAN_2_TOKENS = 125_696  # vocabulary of Baichuan 2, whose heads are normalized


def llama_like(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return Llama's keys for what other names have in files of InternLM, openPangu and TeleChat3.

    InternLM and openPangu call biases of attention `bias`. TeleChat3's YaRN multiplies rotated
    queries and keys by 1 + 0.07 ln(factor), instead of 1 + 0.1 ln(factor).
    """
    found: dict[str, Any] = {}
    if "bias" in config and "attention_bias" not in config:
        found["attention_bias"] = config["bias"]
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key)
        if not isinstance(rope, Mapping) or TELECHAT_YARN not in (rope.get(k) for k in _TYPE_KEYS):
            continue
        types = {name: "yarn" for name in _TYPE_KEYS if name in rope}
        factor = rope.get("factor")
        if type(factor) not in (int, float) or factor <= 0:
            raise config_error(f"{key} factor", "a number above 0", factor)
        scaled = {"attention_factor": 1.0 + 0.07 * math.log(max(factor, 1.0))}
        found[key] = {**rope, **types, **scaled}
    return found


def orion(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return StableLM's keys for Orion, which rotates whole heads; nothing for StableLM itself."""
    if "rms_norm_eps" not in config or "layer_norm_eps" in config:
        return {}
    whole = {"partial_rotary_factor": 1.0}
    found = {**whole, "layer_norm_eps": config["rms_norm_eps"]}
    if isinstance(rope := config.get("rope_parameters"), Mapping):
        found["rope_parameters"] = {**rope, **whole}
    return found


def exaone(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of EXAONE's config class."""
    return {
        **inner_width("intermediate_size")(config),
        "activation_function": config.get("activation_function", "silu"),
        "layer_norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
        "tie_word_embeddings": config.get("tie_word_embeddings", True),
    }


def baichuan(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `norm_head`: True for Baichuan 2, whose config.json does not state it."""
    is_second = config.get("vocab_size") == BAICHUAN_2_TOKENS
    return {"norm_head": config.get("norm_head", is_second)}


def qwen(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the feed-forward's width, the RoPE parameters and the length that Qwen 1 supports.

    The stated width counts gate and up. Beyond `seq_length` the model changes earlier keys
    (`use_dynamic_ntk`), which is impossible with a KV cache.
    """
    width, length = config.get("intermediate_size"), config.get("seq_length", 2048)
    return {
        **(known_sizes(mlp_width=config.get("mlp_width", width // 2)) if is_size(width) else {}),
        **known_sizes(max_position_embeddings=length),
        "layer_norm_epsilon": config.get("layer_norm_epsilon", 1e-6),
        "rope_theta": config.get("rotary_emb_base", 10000.0),
        "partial_rotary_factor": config.get("rotary_pct", 1.0),
    }


def bailing(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the width of all shared experts together, and the default of Bailing's config class.

    Raises CheckpointError if the number of dense layers is not an integer.
    """
    dense = config.get("first_k_dense_replace")
    if dense is not None and type(dense) is not int:
        raise config_error("first_k_dense_replace", "a number of layers", dense)
    found = {"norm_topk_prob": config.get("norm_topk_prob", True)}
    width = config.get("moe_shared_expert_intermediate_size") or config.get("moe_intermediate_size")
    count = config.get("num_shared_experts")
    if not (is_size(width) and is_size(count)):
        return found
    return {**found, "shared_expert_intermediate_size": width * count}


def sarvam(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return Ling's keys, and the defaults of Sarvam's config class. Whole heads rotate.

    Raises CheckpointError if the number of dense layers is not an integer.
    """
    whole = {"partial_rotary_factor": 1.0}
    found = {
        **bailing(config),
        **whole,
        "n_group": config.get("n_group", 1),
        "topk_group": config.get("topk_group", 1),
        "routed_scaling_factor": config.get("routed_scaling_factor", 2.5),
        "use_qk_norm": config.get("use_qk_norm", True),
    }
    if isinstance(rope := config.get("rope_parameters"), Mapping):
        found["rope_parameters"] = {**rope, **whole}
    return found


def plamo_3(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layer types, and the RoPE parameters of each type.

    Every `sliding_window_pattern`-th layer sees all keys. Raises CheckpointError if layers have
    different windows, or windows that contradict `layer_types`.
    """
    found: dict[str, Any] = {"head_dim": config.get("head_dim", 128)}
    count, every = config.get("num_hidden_layers"), config.get("sliding_window_pattern", 8)
    types, kinds = config.get("layer_types"), ("full_attention", "sliding_attention")
    if types is None and is_size(count):
        if not is_size(every):
            raise config_error("sliding_window_pattern", "a number above 0", every)
        layers = range(min(count, MAX_LAYERS))
        types = found["layer_types"] = [kinds[bool((layer + 1) % every)] for layer in layers]
    window = config.get("sliding_window", 128)
    if isinstance(window, list):  # one for each layer, None in those that see all keys
        sizes = [each for each in window if each is not None]
        if not (sizes and is_size(sizes[0]) and sizes == sizes[:1] * len(sizes)):
            expected = "the same window in all layers that have one"
            raise config_error("sliding_window", expected, window)
        if types != [kinds[each is not None] for each in window]:
            raise config_error("sliding_window", f"windows as in the layers {types}", window)
        window = sizes[0]
    found["sliding_window"] = window
    stated = config.get("rope_parameters")
    if isinstance(stated, Mapping) and "full_attention" in stated:
        return found
    whole: dict[str, Any] = {"rope_type": "default"}
    if (factor := config.get("rope_scaling_factor", 1)) != 1:
        original = config.get("initial_context_length")
        whole = {"rope_type": "yarn", "factor": factor, "beta_fast": 32.0, "beta_slow": 1.0}
        whole |= {"original_max_position_embeddings": original, "truncate": False}
    theta = config.get("rope_theta", config.get("rope_global_theta", 150_000))
    local = {"rope_type": "default", "rope_theta": config.get("rope_local_theta", 10_000)}
    ropes = {"full_attention": {**whole, "rope_theta": theta}, "sliding_attention": local}
    return {**found, "rope_parameters": ropes}


def plamo_2(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layer types, the sizes of mixers, and RoPE parameters for both types of attention.

    One layer in every `mamba_step` layers has attention. It has a window unless
    `full_attention_idx` names it.
    """
    heads, width = config.get("mamba_n_heads", 64), config.get("head_dim", 128)
    found: dict[str, Any] = {
        **{"head_dim": width, "mamba_d_head": width, "mamba_n_heads": heads},
        "mamba_n_groups": heads,  # of rows in the first matrix; all heads share B and C
        "mamba_d_state": config.get("mamba_d_state", 64),
        "mamba_d_conv": config.get("mamba_d_conv", 4),
    }
    if is_size(hidden := config.get("hidden_size")):
        found["mamba_dt_rank"] = max(64, hidden // 16)
    if is_size(window := config.get("attention_window_size", 2048)):
        found["sliding_window"] = window + 1  # keys before a query, and its own
    if is_size(count := config.get("num_hidden_layers", 32)):
        found["layer_types"] = _layers_of_plamo_2(config, count)
    stated = config.get("rope_parameters")
    stated = stated if isinstance(stated, Mapping) else {}
    if "full_attention" in stated:
        return found
    theta = config.get("rope_theta", stated.get("rope_theta", 10_000))
    kinds = {"full_attention": theta, "sliding_attention": config.get("rope_local_theta", theta)}
    ropes = {k: {"rope_type": "default", "rope_theta": value} for k, value in kinds.items()}
    return {**found, "rope_parameters": ropes}


def _layers_of_plamo_2(config: Mapping[str, Any], count: int) -> list[str]:
    """Return the kind of each layer. Raises CheckpointError if config.json states no period."""
    full = layer_numbers(config, "full_attention_idx")
    step = config.get("mamba_step", 2)
    if not is_size(step):
        raise config_error("mamba_step", "a number above 0", step)
    layers = range(min(count, MAX_LAYERS))
    attends = {i for i in layers if i % step == step // 2} or {count - 1}
    if not config.get("mamba_enabled", True):
        attends = {*layers}
    kinds = ("sliding_attention", "full_attention")
    return [kinds[i in full] if i in attends else "linear_attention" for i in layers]
