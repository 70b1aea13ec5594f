"""Families with experts: the layers without experts, and the experts per token."""

from collections.abc import Mapping
from typing import Any

from formats.architecture.family import MAX_LAYERS
from formats.architecture.sizes import is_size
from formats.architecture.stored_form.parts import known_sizes
from formats.errors import CheckpointError


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
