"""Families with experts: the layers without experts, and the experts per token."""

from collections.abc import Mapping
from typing import Any

from formats.architecture.family import MAX_LAYERS
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
    """Return transformers' defaults: kinds of layers, and the number of layers without experts."""
    count, every = config.get("num_hidden_layers"), config.get("global_attn_every_n_layers", 4)
    found: dict[str, Any] = {"num_dense_layers": config.get("num_dense_layers", 1)}
    if config.get("layer_types") is None and is_size(count) and is_size(every):
        kinds = ("full_attention", "sliding_attention")
        layers = range(min(count, MAX_LAYERS))
        found["layer_types"] = [kinds[bool((layer + 1) % every)] for layer in layers]
    return found
