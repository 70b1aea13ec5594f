"""DeepSeek-V4: types of layers from the keys of published files, and published names of tensors.

transformers renames tensors twice: its modules have other names, and `save_pretrained` writes a mix
of both. The family's row has the published names.
"""

import re
from collections.abc import Mapping
from typing import Any

from formats.architecture.family import MAX_LAYERS
from formats.architecture.rows.deepseek_v4 import HEAVY, SLIDING, SPARSE
from formats.architecture.sizes import is_size
from formats.architecture.stored_form.float_blocks_config import as_groups
from formats.errors import config_error

# tokens of a compressed entry -> type of layer, in the list `compress_ratios`
_OF_RATIO = {0: SLIDING, 4: SPARSE, 128: HEAVY}
_RATES = {SPARSE: ("compress_rate_csa", 4), HEAVY: ("compress_rate_hca", 128)}
_HASHED, _SCORED = "hash_moe", "moe"
# transformers' defaults
_DEFAULTS: dict[str, Any] = {
    **{"head_dim": 512, "num_key_value_heads": 1, "q_lora_rank": 1024, "o_groups": 8},
    **{"o_lora_rank": 1024, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512},
    **{"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 6, "hc_mult": 4},
    **{"hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "sliding_window": 128, "swiglu_limit": 10.0},
}


def keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return types and rates of layers, limits of activations, and transformers' defaults.

    Raises CheckpointError for a type of layer that does not exist.
    """
    found = {key: value for key, value in _DEFAULTS.items() if config.get(key) is None}
    rates = config.get("compress_rates")
    rates = rates if isinstance(rates, Mapping) else {}
    for kind, (key, usual) in _RATES.items():
        rate = config.get(key)
        found[key] = rates.get(kind, usual) if rate is None else rate
        if not is_size(found[key]):
            raise config_error(key, "a number of tokens above 0", found[key])
    found |= as_groups(config)
    found["compress_rates"] = {kind: found[key] for kind, (key, _) in _RATES.items()}
    limit = config.get("swiglu_limit", _DEFAULTS["swiglu_limit"])
    if type(limit) not in (int, float) or not limit > 0:
        raise config_error("swiglu_limit", "a number above 0", limit)
    count = config.get("num_hidden_layers")
    if is_size(count):
        count = min(count, MAX_LAYERS)
        found["swiglu_limits"] = [float(limit)] * count
        found["layer_types"] = _kinds(config, count)
        found["mlp_layer_types"] = _expert_kinds(config, count)
    return found


def _kinds(config: Mapping[str, Any], count: int) -> list[str]:
    """Return the type of attention of each layer."""
    kinds, ratios = config.get("layer_types"), config.get("compress_ratios")
    if kinds is None and ratios is not None:
        is_list = isinstance(ratios, list) and len(ratios) >= count
        if not is_list or not all(ratio in _OF_RATIO for ratio in ratios[:count]):
            expected = f"a list with 0, 4 or 128 for each of {count} layers"
            raise config_error("compress_ratios", expected, ratios)
        kinds = [_OF_RATIO[ratio] for ratio in ratios]
    if kinds is None:
        kinds = [HEAVY, HEAVY, *((SPARSE if i % 2 else HEAVY) for i in range(count))]
    return _checked("layer_types", kinds, tuple(_OF_RATIO.values()), count)


def _expert_kinds(config: Mapping[str, Any], count: int) -> list[str]:
    """Return for each layer whether a table of tokens or a score chooses experts."""
    kinds, hashed = config.get("mlp_layer_types"), config.get("num_hash_layers")
    if kinds is None:
        hashed = 3 if hashed is None else hashed
        if type(hashed) is not int or hashed < 0:
            raise config_error("num_hash_layers", "a number of layers", hashed)
        kinds = [_HASHED if i < hashed else _SCORED for i in range(count)]
    return _checked("mlp_layer_types", kinds, (_HASHED, _SCORED), count)


def _checked(key: str, kinds: Any, known: tuple[str, ...], count: int) -> list[str]:
    is_list = isinstance(kinds, list) and len(kinds) >= count
    if not is_list or not all(kind in known for kind in kinds[:count]):
        raise config_error(key, f"{' or '.join(known)} for each of {count} layers", kinds)
    return kinds[:count]


# (part of a name, its replacement), applied in this order to names without the prefix `model.`
_RENAMED = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^embed_tokens\.", "embed."),
        (r"^lm_head\.", "head."),
        (r"^hc_head\.hc_", "hc_head_"),
        (r"\.self_attn\.", ".attn."),
        (r"\.mlp\.", ".ffn."),
        (r"\.input_layernorm\.", ".attn_norm."),
        (r"\.post_attention_layernorm\.", ".ffn_norm."),
        (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
        (r"\.attn\.sinks$", ".attn.attn_sink"),
        (r"\.compressor\.indexer\.scorer\.", ".indexer."),
        (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
        (r"\.compressor\.indexer\.", ".indexer.compressor."),
        (r"\.compressor\.kv_norm\.", ".compressor.norm."),
        (r"\.attn\.norm\.", ".attn.kv_norm."),
        (r"\.attn\.q_a_norm\.", ".attn.q_norm."),
        (r"\.attn\.(q|o)_(a|b)_proj\.", r".attn.w\1_\2."),
        (r"(\.attn\..*)\.?\bkv_proj\.", r"\1wkv."),
        (r"(\.compressor)\.gate_proj\.", r"\1.wgate."),
        (r"\.position_bias$", ".ape"),
        (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
        (r"(\.ffn\.(?:shared_experts|experts\.\d+))\.gate_proj\.", r"\1.w1."),
        (r"(\.ffn\.(?:shared_experts|experts\.\d+))\.down_proj\.", r"\1.w2."),
        (r"(\.ffn\.(?:shared_experts|experts\.\d+))\.up_proj\.", r"\1.w3."),
    )
)


def published(name: str) -> str:
    """Return the published name of a tensor that may have a name of transformers."""
    name = name.removeprefix("model.")
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    return name
