"""Families with experts: the layers without experts, and the experts per token."""

from collections.abc import Mapping
from typing import Any

from formats.architecture.family import MAX_LAYERS
from formats.architecture.rows.parts import COHERE_KIND
from formats.architecture.sizes import is_size
from formats.architecture.stored_form.parts import known_sizes
from formats.errors import CheckpointError, config_error


def ernie_moe(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layers without experts, which ERNIE states as a range and an interval."""
    count, every = config.get("num_hidden_layers"), config.get("moe_layer_interval", 1)
    first, last = config.get("moe_layer_start_index", 1), config.get("moe_layer_end_index", -1)
    if not is_size(count) or not is_size(every) or type(first) is not int or type(last) is not int:
        return {}
    last = count - 1 if last == -1 else last
    layers = range(min(count, MAX_LAYERS))
    return {
        "mlp_only_layers": [i for i in layers if (i + 1) % every or not first <= i <= last],
        **known_sizes(n_shared_experts=config.get("moe_num_shared_experts", 2)),
    }


def cohere_moe(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the types of layers, the layers that rotate, and the variant of Cohere 2 MoE.

    Raises CheckpointError for an unknown function of the router or sum of the experts.
    """
    scores = config.get("expert_selection_fn", "softmax")
    if scores not in ("softmax", "sigmoid"):
        raise config_error("expert_selection_fn", "softmax or sigmoid", scores)
    combined = config.get("shared_expert_combination_strategy", "average")
    if combined not in ("average", "sum"):
        raise config_error("shared_expert_combination_strategy", "average or sum", combined)
    norms = "layer" if config.get("rms_norm_eps") is None else "rms"
    shared, inner = config.get("num_shared_experts", 0), config.get("intermediate_size")
    found: dict[str, Any] = {
        COHERE_KIND: [norms, scores, is_size(shared)],
        "shared_expert_combination_strategy": combined,
    }
    if is_size(inner):
        found["moe_intermediate_size"] = inner
        if config.get("prefix_dense_intermediate_size") is None:
            found["prefix_dense_intermediate_size"] = inner
        if is_size(shared):
            found["shared_expert_intermediate_size"] = inner * shared
    count, num_dense = config.get("num_hidden_layers"), config.get("first_k_dense_replace", 0)
    if not is_size(count) or type(num_dense) is not int:
        return found
    layers, of_dense = range(min(count, MAX_LAYERS)), _every(config, "prefix_dense_", 1)
    blocks = config.get("mlp_layer_types")
    if blocks is None:
        blocks = ["dense" if i < num_dense else "sparse" for i in layers]
    kinds = config.get("layer_types")
    if kinds is None:
        every, kinds = _every(config, "", 4), []
        for i in layers:
            place, pattern = (i, of_dense) if i < num_dense else (i - num_dense, every)
            kinds.append("sliding_attention" if (place + 1) % pattern else "full_attention")
    has_windows = config.get("sliding_window", 4096) is not None
    rotating = [
        int(has_windows and kind == "sliding_attention" or block == "dense" and of_dense == 1)
        for kind, block in zip(kinds, blocks, strict=False)
    ]
    return {
        **found,
        "layer_types": kinds,
        "mlp_layer_types": blocks,
        "no_rope_layers": rotating,  # 1: the layer rotates
    }


def _every(config: Mapping[str, Any], prefix: str, default: int) -> int:
    """Return how many layers have one without a window. Raises CheckpointError."""
    key = f"{prefix}sliding_window_pattern"
    found = config.get(key, default)
    if not is_size(found):
        raise config_error(key, "a number above 0", found)
    return found


def ernie_vl(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers and sizes of the experts for text and for tokens of images.

    Published files list both, and state the layers with experts as two ranges, of which the longer
    counts. Raises CheckpointError for unequal numbers.
    """
    stated = config.get("moe_num_experts", 64)
    numbers = stated if isinstance(stated, list) else [stated, stated]
    if len(numbers) != 2 or numbers[0] != numbers[1] or not is_size(numbers[0]):
        raise config_error("moe_num_experts", "two equal numbers above 0", stated)
    found: dict[str, Any] = {
        "moe_num_experts": numbers[0],
        "n_routed_experts": 2 * numbers[0],
        "num_experts_per_tok": config.get("moe_k", 6),
    }
    sizes = config.get("moe_intermediate_size", [1536, 512])
    if isinstance(sizes, list) and len(sizes) == 2:
        shared = config.get("moe_num_shared_experts", 2)
        found |= known_sizes(text_expert_size=sizes[0], media_expert_size=sizes[1])
        if is_size(sizes[0]) and is_size(shared):
            found["moe_shared_expert_intermediate_size"] = shared * sizes[0]
    count, every = config.get("num_hidden_layers"), config.get("moe_layer_interval", 1)
    if config.get("mlp_layer_types") is None and is_size(count) and is_size(every):
        first = min(_numbers(config, "moe_layer_start_index", 1))
        last = max(_numbers(config, "moe_layer_end_index", count - 1))
        found["mlp_layer_types"] = [
            "dense" if (i + 1) % every or not first <= i <= last else "sparse"
            for i in range(min(count, MAX_LAYERS))
        ]
    return found


def _numbers(config: Mapping[str, Any], key: str, usual: int) -> list[int]:
    """Return a number, or a list of numbers, of config.json as a list. Raises CheckpointError."""
    stated = config.get(key, usual)
    numbers = stated if isinstance(stated, list) else [stated]
    if not numbers or any(type(each) is not int for each in numbers):
        raise config_error(key, "a whole number, or a list of them", stated)
    return numbers


def llama4(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layers without experts.

    config.json states the layers with experts, or an interval between them.
    """
    count, every = config.get("num_hidden_layers"), config.get("interleave_moe_layer_step", 1)
    stated = config.get("moe_layers")
    if not is_size(count) or not is_size(every):
        return {}
    layers = range(min(count, MAX_LAYERS))
    sparse = stated if isinstance(stated, list) else layers[every - 1 :: every]
    return {"mlp_only_layers": [i for i in layers if i not in sparse]}


def hunyuan_moe(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the experts per token as one number; published files list one for each layer.

    Raises CheckpointError if layers differ.
    """
    stated = config.get("moe_topk")
    if not isinstance(stated, list) or not stated:
        return {}
    if any(each != stated[0] for each in stated):
        raise CheckpointError(
            "config.json moe_topk",
            f"expected the same number of experts in each layer, found {stated!r:.80}",
            "use a model whose layers are alike",
        )
    return {"moe_topk": stated[0], "num_experts_per_tok": stated[0]}


def afmoe(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return transformers' defaults: layer types, and the number of layers without experts."""
    count, every = config.get("num_hidden_layers"), config.get("global_attn_every_n_layers", 4)
    found: dict[str, Any] = {"num_dense_layers": config.get("num_dense_layers", 1)}
    if config.get("layer_types") is None and is_size(count) and is_size(every):
        kinds = ("full_attention", "sliding_attention")
        layers = range(min(count, MAX_LAYERS))
        found["layer_types"] = [kinds[bool((layer + 1) % every)] for layer in layers]
    return found


# sizes of MiniMax-M3's indexer: transformers' key -> key of sparse_attention_config
_INDEX_KEYS = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}
_INDEX_DEFAULTS = {
    **{"index_n_heads": 4, "index_head_dim": 128, "index_block_size": 128},
    **{"index_topk_blocks": 16, "index_local_blocks": 1},
}


def minimax_m3(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of the indexer, and the layers that have indexers and experts.

    Published files state the first under `sparse_attention_config`, and the layers as lists of 0
    and 1. Raises CheckpointError for sizes that do not fit.
    """
    count, sparse = config.get("num_hidden_layers"), config.get("sparse_attention_config")
    sparse = sparse if isinstance(sparse, Mapping) else {}
    found: dict[str, Any] = {}
    for key, stored in _INDEX_KEYS.items():
        value = sparse.get(stored, config.get(key, _INDEX_DEFAULTS[key]))
        if type(value) is not int or value < (key != "index_local_blocks"):
            stated = f"sparse_attention_config.{stored}" if stored in sparse else key
            raise config_error(stated, "a number above 0", value)
        found[key] = value
    if not is_size(count):
        return found
    for key, kinds, stated in (
        (
            "layer_types",
            ("full_attention", "minimax_m3_sparse"),
            sparse.get("sparse_attention_freq", [0] * min(count, MAX_LAYERS)),
        ),
        (
            "mlp_layer_types",
            ("dense", "sparse"),
            config.get("moe_layer_freq", [1] * min(count, MAX_LAYERS)),
        ),
    ):
        if config.get(key) is None:
            if not isinstance(stated, list) or len(stated) < min(count, MAX_LAYERS):
                raise config_error(key, f"a list of {count} layers", stated)
            found[key] = [kinds[bool(each)] for each in stated[:count]]
    kinds = found.get("layer_types", config.get("layer_types"))
    if not isinstance(kinds, list) or "minimax_m3_sparse" not in kinds:
        return found
    heads, kv_heads = found["index_n_heads"], config.get("num_key_value_heads", 4)
    if is_size(kv_heads) and heads != kv_heads:
        raise config_error("index_n_heads", f"{kv_heads}, one for each KV head", heads)
    without_values = sparse.get("sparse_disable_index_value")
    if isinstance(without_values, list):
        for layer, (kind, without) in enumerate(zip(kinds, without_values, strict=False)):
            if kind == "minimax_m3_sparse" and not without:
                raise config_error(
                    f"sparse_disable_index_value of layer {layer}",
                    "1, since indexers with values are not supported",
                    without,
                    "use a model without them",
                )
    return found
