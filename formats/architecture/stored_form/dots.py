"""dots3-note: kinds of layers and the widths of those with a window."""

from collections.abc import Mapping
from typing import Any

from formats.architecture.family import MAX_LAYERS
from formats.architecture.rows.dots import INDEXED
from formats.architecture.sizes import is_size
from formats.architecture.stored_form.parts import expert_layers, known_sizes
from formats.errors import CheckpointError, config_error

_WINDOW = "sliding_attention"
# key of layers with a window -> transformers' default, and that of layers without
_LOCAL = {
    "num_attention_heads": (64, 128),
    "q_lora_rank": (1024, 1024),
    "kv_lora_rank": (1024, 512),
    "qk_nope_head_dim": (192, 128),
    "v_head_dim": (128, 128),
    "qk_rope_head_dim": (64, 64),
}
_ALIKE = ("v_head_dim", "qk_rope_head_dim")  # the same in all layers


def dots3(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the usual keys, and transformers' defaults.

    Published files have keys with the prefix `swa_` for layers with a window; transformers writes
    `per_layer_config`. Raises CheckpointError for widths that no published model has.
    """
    count = config.get("num_hidden_layers")
    if not is_size(count):
        return {}
    kinds = _layer_types(config, min(count, MAX_LAYERS))
    wide = {key: config.get(key, default) for key, (_, default) in _LOCAL.items()}
    local = _of_windows(config, kinds, wide)
    for key in _ALIKE:
        if local[key] != wide[key]:
            raise config_error(f"swa_{key}", f"{key}, {wide[key]!r}", local[key])
    shared, of_each = config.get("n_shared_experts", 1), _shared_width(config)
    heads, local_heads = wide["num_attention_heads"], local["num_attention_heads"]
    return {
        **expert_layers(config),
        "layer_types": kinds,
        "num_nextn_predict_layers": config.get("num_nextn_predict_layers", 1),
        "sliding_window": config.get("sliding_window") or config.get("sliding_window_size", 512),
        **known_sizes(
            **wide,
            num_key_value_heads=heads,
            num_global_attention_heads=heads,
            num_global_key_value_heads=heads,
            global_head_dim=wide["v_head_dim"],
            num_local_attention_heads=local_heads,
            num_local_key_value_heads=local_heads,
            local_q_lora_rank=local["q_lora_rank"],
            local_kv_lora_rank=local["kv_lora_rank"],
            local_qk_nope_head_dim=local["qk_nope_head_dim"],
            shared_expert_intermediate_size=(
                shared * of_each if is_size(shared) and is_size(of_each) else None
            ),
            index_topk=config.get("index_topk", 2048),
            index_n_heads=config.get("index_n_heads", 64),
            index_head_dim=config.get("index_head_dim", 128),
        ),
    }


def _layer_types(config: Mapping[str, Any], count: int) -> list[str]:
    """Return the kind of each layer. Raises CheckpointError for other kinds.

    Published files call layers with an indexer `full_attention`.
    """
    kinds = config.get("layer_types")
    if kinds is None:
        return [INDEXED if i < 2 or i % 4 == 1 else _WINDOW for i in range(count)]
    if not isinstance(kinds, list) or len(kinds) < count:
        raise config_error("layer_types", f"a list of {count} layers", kinds)
    if "per_layer_config" not in config:
        kinds = [INDEXED if kind == "full_attention" else kind for kind in kinds]
    for kind in kinds:
        if kind not in (INDEXED, _WINDOW):
            raise config_error("layer_types", f"only {INDEXED} and {_WINDOW}", kind)
    return kinds


def _of_windows(
    config: Mapping[str, Any], kinds: list[str], wide: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values of layers with a window. Raises CheckpointError if these differ."""
    stated = config.get("per_layer_config")
    if not isinstance(stated, Mapping):
        return {key: config.get(f"swa_{key}", default) for key, (default, _) in _LOCAL.items()}
    found = None
    for number, kind in enumerate(kinds):
        own = stated.get(str(number), stated.get(number)) or {}
        if kind != _WINDOW:
            own = {key: each for key, each in own.items() if key in _LOCAL and each != wide[key]}
            if own:
                raise config_error(f"per_layer_config of layer {number}", "no widths", own)
            continue
        values = {key: own.get(key, wide[key]) for key in _LOCAL}
        if found not in (None, values):
            raise CheckpointError(
                "config.json per_layer_config",
                f"expected the same widths in all layers of the type {_WINDOW}, found {values} in"
                f" layer {number}",
                "use a model whose layers of one type are alike",
            )
        found = values
    return found or dict(wide)


def _shared_width(config: Mapping[str, Any]) -> Any:
    """Return the features of each shared expert."""
    published = config.get("moe_shared_expert_intermediate_size", 1536)
    return config.get("shared_experts_intermediate_size", published)
