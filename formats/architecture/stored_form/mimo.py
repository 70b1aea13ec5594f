"""MiMo-V2: heads, layer types and RoPE parameters, from the keys of published files."""

from collections.abc import Mapping
from typing import Any

from formats.architecture.family import MAX_LAYERS
from formats.architecture.sizes import is_size
from formats.architecture.stored_form.fused_qkv import separate_qkv_keys
from formats.architecture.stored_form.parts import known_sizes
from formats.errors import config_error

_KINDS = ("full_attention", "sliding_attention")


def mimo_v2(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the canonical keys, and transformers' defaults.

    Layers with a window have twice as many KV heads unless the file states their number. Raises
    CheckpointError for heads or sinks of a layer type that no published model has.
    """
    count = config.get("num_hidden_layers")
    if not is_size(count):
        return {}
    count = min(count, MAX_LAYERS)
    found = {
        **separate_qkv_keys(config, count),
        **_layers(config, count),
        **_rope_parameters(config),
    }
    if "layernorm_epsilon" in config:
        found["rms_norm_eps"] = config["layernorm_epsilon"]
    if config.get("routed_scaling_factor", 1.0) is None:
        found["routed_scaling_factor"] = 1.0
    before = config.get("sliding_window_size")
    if is_size(before):
        # Tokens before the query, which is not among them, as in SGLang and transformers. vLLM
        # and llama.cpp's converter count the query among them: one token fewer.
        found["sliding_window"] = before + 1
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads", 4)
    head_dim, value_dim = config.get("head_dim", 192), config.get("v_head_dim", 128)
    twice = 2 * kv_heads if is_size(kv_heads) else None
    for key, usual in (
        ("swa_head_dim", head_dim),
        ("swa_v_head_dim", value_dim),
        ("add_full_attention_sink_bias", False),
        ("add_swa_attention_sink_bias", True),
    ):
        if config.get(key, usual) != usual:
            raise config_error(key, f"{usual!r}".lower(), config[key])
    return {
        **found,
        **known_sizes(
            num_local_attention_heads=config.get("swa_num_attention_heads", heads),
            num_global_attention_heads=heads,
            num_local_key_value_heads=config.get("swa_num_key_value_heads", twice),
            num_global_key_value_heads=kv_heads,
            head_dim=head_dim,
            global_head_dim=head_dim,
            v_head_dim=value_dim,
        ),
    }


def _layers(config: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return the types of attention and feed-forward by layer, if config.json has other keys."""
    found: dict[str, Any] = {}
    windows, sparse = (config.get(key) for key in ("hybrid_layer_pattern", "moe_layer_freq"))
    for key, each in (("hybrid_layer_pattern", windows), ("moe_layer_freq", sparse)):
        if each is not None and not (isinstance(each, list) and len(each) >= count):
            raise config_error(key, f"a list with 0 or 1 for each of {count} layers", each)
    windows = windows or [i > 0 and (i + 1) % 6 != 0 for i in range(count)]
    sparse = sparse or [i > 0 for i in range(count)]
    if config.get("layer_types") is None:
        found["layer_types"] = [_KINDS[bool(each)] for each in windows[:count]]
    if config.get("mlp_layer_types") is None:
        found["mlp_layer_types"] = [("dense", "sparse")[bool(each)] for each in sparse[:count]]
    return found


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the RoPE parameters of each layer type, where config.json has other keys."""
    rope = config.get("rope_parameters")
    if "swa_rope_theta" not in config or (isinstance(rope, Mapping) and _KINDS[0] in rope):
        return {}
    own = rope if isinstance(rope, Mapping) else {}
    part = own.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    thetas = (own.get("rope_theta", config.get("rope_theta", 5e6)), config["swa_rope_theta"])
    return {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": part}
            for kind, theta in zip(_KINDS, thetas, strict=True)
        }
    }
