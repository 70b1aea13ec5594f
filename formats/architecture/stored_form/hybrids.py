"""Families with recurrent layers: layer types, widths of heads and of feed-forwards."""

import math
from collections.abc import Mapping
from typing import Any

from formats.architecture.family import MAX_LAYERS, architecture_of
from formats.architecture.sizes import NOT_FINITE, is_size, layer_numbers
from formats.architecture.states.inkling import FULL, WINDOW
from formats.architecture.stored_form.latent import query_rank
from formats.architecture.stored_form.own_code import bailing
from formats.architecture.stored_form.parts import known_sizes
from formats.errors import config_error


def kimi_linear(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layer types and the sizes of mixers, from a part of config.json."""
    own, count = config.get("linear_attn_config"), config.get("num_hidden_layers")
    own = own if isinstance(own, Mapping) else {}
    found = query_rank(None)(config)
    for usual, key, default in (
        ("linear_head_dim", "head_dim", 128),
        ("linear_num_heads", "num_heads", 32),
        ("linear_conv_kernel_dim", "short_conv_kernel_size", 4),
    ):
        found[usual] = own.get(key, config.get(usual, default))
    if not is_size(count):
        return found
    layers, full = range(min(count, MAX_LAYERS)), own.get("full_attn_layers")
    if config.get("layer_types") is None and isinstance(full, list):
        # the file numbers layers from 1
        kinds = ("linear_attention", "full_attention")
        found["layer_types"] = [kinds[layer + 1 in full] for layer in layers]
    if config.get("mlp_layer_types") is None:
        first = config.get("first_k_dense_replace", 1)
        dense = first if type(first) is int else 0
        found["mlp_layer_types"] = [("sparse", "dense")[layer < dense] for layer in layers]
    return found


def ling_3(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layer types, the sizes of mixers, and RoPE parameters without a part."""
    count, every = config.get("num_hidden_layers"), config.get("layer_group_size", 6)
    first = config.get("first_k_dense_replace", 2)
    heads = config.get("linear_num_heads", config.get("num_attention_heads"))
    found: dict[str, Any] = {
        **query_rank(None)(config),
        "linear_num_heads": heads,
        "linear_head_dim": config.get("linear_head_dim", config.get("head_dim", 128)),
        "linear_conv_kernel_dim": config.get("short_conv_kernel_size", 4),
    }
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := config.get(key), Mapping):
            # published files state a part, but all rotated channels of a latent's key rotate
            found[key] = {k: value for k, value in rope.items() if k != "partial_rotary_factor"}
    if not is_size(count):
        return found
    layers = range(min(count, MAX_LAYERS))
    if config.get("layer_types") is None and is_size(every):
        kinds = ("linear_attention", "full_attention")
        found["layer_types"] = [kinds[(layer + 1) % every == 0] for layer in layers]
    if config.get("mlp_layer_types") is None and type(first) is int:
        found["mlp_layer_types"] = [("sparse", "dense")[layer < first] for layer in layers]
    return found


def lightning_ling(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layer types, and the sizes and RoPE parameters of lightning attention."""
    count, every = config.get("num_hidden_layers"), config.get("layer_group_size")
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    width = config.get("linear_head_dim", config.get("head_dim"))
    if width is None and is_size(hidden) and is_size(heads):
        width = hidden // heads
    rope, factor = config.get("rope_parameters"), config.get("lightning_rotary_factor")
    if factor is None:
        rope = rope if isinstance(rope, Mapping) else {}
        factor = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    found = {
        **bailing(config),
        "linear_num_heads": heads,
        "linear_head_dim": width,
        "lightning_rotary_factor": factor,
    }
    if not (is_size(count) and is_size(every)):
        return found
    # layers after the last whole group have attention, too
    kinds, tail = ("linear_attention", "full_attention"), count // every * every
    layers = range(min(count, MAX_LAYERS))
    full = [(layer + 1) % every == 0 or layer >= tail for layer in layers]
    return {**found, "layer_types": [kinds[each] for each in full]}


def bailing_hybrid(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of Ling 2.6 or of Ling 3, which have one model_type."""
    if architecture_of(config) == "BailingMoeV2_5ForCausalLM":
        return {**query_rank(None)(config), **lightning_ling(config)}
    return ling_3(config)


def olmo_hybrid(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layer types and the sizes of the nets, where config.json states none."""
    found: dict[str, Any] = {}
    count, heads, hidden = (
        config.get(key) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    if config.get("layer_types") is None and is_size(count):
        kinds = ["linear_attention", "full_attention"]
        layers = range(min(count, MAX_LAYERS))
        found["layer_types"] = [kinds[i % 4 == 3 or i + 1 == count < 4] for i in layers]
    of_keys, of_values = (config.get(f"linear_num_{x}_heads") or heads for x in ("key", "value"))
    width = config.get("linear_key_head_dim")
    if width is None and is_size(hidden) and is_size(of_keys):
        width = int(0.75 * hidden / of_keys)
    if not (is_size(of_keys) and is_size(of_values) and is_size(width)):
        return found
    return {
        **found,
        **{"linear_num_key_heads": of_keys, "linear_num_value_heads": of_values},
        "linear_key_head_dim": width,
        "linear_value_head_dim": config.get("linear_value_head_dim") or 2 * width,
    }


def minimax(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layer types, and the fraction of a head that has RoPE."""
    found: dict[str, Any] = {}
    count, kinds = config.get("num_hidden_layers"), config.get("attn_type_list")
    if config.get("layer_types") is None and isinstance(kinds, list):
        names = ("linear_attention", "full_attention")
        found["layer_types"] = [names[bool(kind)] for kind in kinds[:MAX_LAYERS]]
    elif config.get("layer_types") is None and is_size(count):
        names = ("full_attention", "linear_attention")
        found["layer_types"] = [names[layer % 2] for layer in range(min(count, MAX_LAYERS))]
    rotated, head_dim, rope = (
        config.get(key) for key in ("rotary_dim", "head_dim", "rope_parameters")
    )
    if is_size(rotated) and is_size(head_dim) and isinstance(rope, Mapping):
        found["rope_parameters"] = {**rope, "partial_rotary_factor": rotated / head_dim}
    return found


def lfm2(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the width of LFM2's feed-forward and its layer types.

    Published files state an unadjusted width, `block_ff_dim`, and layers by number.
    """
    found, count = lfm2_moe(config), config.get("num_hidden_layers")
    if config.get("layer_types") is None and is_size(count):
        attends = config.get("full_attn_idxs") and layer_numbers(config, "full_attn_idxs")
        layers = range(min(count, MAX_LAYERS))
        found["layer_types"] = [
            "full_attention" if attends is None or i in attends else "conv" for i in layers
        ]
    width = config.get("block_ff_dim", config.get("intermediate_size", 12288))
    if not is_size(width):
        return found
    if config.get("block_auto_adjust_ff_dim", True):
        width = int(2 * width / 3)
        factor = config.get("block_ffn_dim_multiplier", 1.0)
        step = config.get("block_multiple_of", 256)
        if isinstance(factor, int | float) and 0 < factor < math.inf and is_size(step):
            width = -(-int(factor * width) // step) * step
    widths = {"block_ff_dim": width, "intermediate_size": width}
    return {**found, **widths, "block_auto_adjust_ff_dim": False}


def lfm2_moe(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tie flag of the head, for which LFM2's files have a different key."""
    key = "tie_embedding"
    return {"tie_word_embeddings": config[key]} if key in config else {}


def lfm3(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return transformers' defaults of heads and of the layer types."""
    found: dict[str, Any] = {"head_dim": config.get("head_dim", 128)}
    count = config.get("num_hidden_layers")
    if config.get("layer_types") is None and is_size(count):
        kinds = ("sliding_attention", "conv", "full_attention", "conv")
        layers = range(min(count, MAX_LAYERS))
        found["layer_types"] = [kinds[i % 4] if i else "conv" for i in layers]
    return found


_LAYER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}


def granite_hybrid(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layer types by their current names, and the width of Mamba-2's heads."""
    found, kinds = mamba(config), config.get("layer_types")
    if kinds is None:
        kinds = config.get("layers_block_type")
    if isinstance(kinds, list):
        found["layer_types"] = [_LAYER_TYPES.get(str(kind), kind) for kind in kinds]
    return found


_BLOCKS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def nemotron_h(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layer types, which published files state as a string, and their number.

    Files without experts may still state sizes of experts, so only a layer of experts sets
    `mlp_layer_types`.
    """
    found, kinds = mamba(config), config.get("layers_block_type")
    found["head_dim"] = config.get("head_dim", 128)
    pattern = config.get("hybrid_override_pattern")
    if kinds is None and isinstance(pattern, str):
        kinds = [_BLOCKS.get(letter, letter) for letter in pattern[:MAX_LAYERS]]
    if not isinstance(kinds, list):
        return found
    kinds = [_LAYER_TYPES.get(str(kind), kind) for kind in kinds]
    if "moe" in kinds:
        found["mlp_layer_types"] = ["sparse" if kind == "moe" else "dense" for kind in kinds]
    return {**found, "layer_types": kinds, "num_hidden_layers": len(kinds)}


def mamba(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the width of heads, which files may state as "auto", and the range of steps.

    transformers writes infinity as an object, which its own config classes do not accept.
    """
    found: dict[str, Any] = {}
    limits = config.get("time_step_limit")
    if isinstance(limits, list):
        found["time_step_limit"] = [
            float(each[NOT_FINITE]) if isinstance(each, dict) and NOT_FINITE in each else each
            for each in limits
        ]
    heads, expand = config.get("mamba_n_heads", 128), config.get("mamba_expand", 2)
    hidden, is_auto = config.get("hidden_size"), config.get("mamba_d_head", "auto") == "auto"
    if is_auto and is_size(heads) and is_size(hidden) and is_size(expand):
        inner = config.get("mamba_d_ssm") or expand * hidden
        found |= known_sizes(mamba_d_head=inner // heads) if is_size(inner) else {}
    return found


def inkling(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return transformers' defaults, and the numbers of heads of layers with and without a window.

    Raises CheckpointError if the widths of their heads differ.
    """
    width, local_width = config.get("head_dim", 128), config.get("swa_head_dim", 128)
    if width != local_width:
        raise config_error("swa_head_dim", f"head_dim, {width!r}", local_width)
    routed, shared = config.get("n_routed_experts", 256), config.get("n_shared_experts", 2)
    found: dict[str, Any] = {
        "n_shared_experts": shared,
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
        "logits_mup_width_multiplier": config.get("logits_mup_width_multiplier", 24.0),
        "route_scale": config.get("route_scale", 8.0),
        **known_sizes(
            head_dim=width,
            global_head_dim=width,
            num_global_attention_heads=config.get("num_attention_heads", 64),
            num_global_key_value_heads=config.get("num_key_value_heads", 8),
            num_local_attention_heads=config.get("swa_num_attention_heads", 64),
            num_local_key_value_heads=config.get("swa_num_key_value_heads", 16),
            sliding_window=config.get("sliding_window_size", 512),
            d_rel=config.get("d_rel", 16),
            rel_extent=config.get("rel_extent", 1024),
            conv_kernel_size=config.get("conv_kernel_size", config.get("sconv_kernel_size", 4)),
            n_routed_experts=routed,
            num_experts=routed + shared if is_size(routed) and is_size(shared) else None,
            max_position_embeddings=config.get(
                "max_position_embeddings", config.get("model_max_length")
            ),
        ),
    }
    if config.get("dense_intermediate_size") is not None:
        # published files state the width of experts as intermediate_size
        found["moe_intermediate_size"] = config.get("intermediate_size")
        found["intermediate_size"] = config["dense_intermediate_size"]
        found["dense_intermediate_size"] = None
    count, local = config.get("num_hidden_layers"), config.get("local_layer_ids")
    if not is_size(count):
        return found
    layers = range(min(count, MAX_LAYERS))
    if config.get("layer_types") is None:
        local = local if isinstance(local, list) else [i for i in layers if (i + 1) % 6]
        found["layer_types"] = [(FULL, WINDOW)[i in local] for i in layers]
    if config.get("mlp_layer_types") is None:
        first = config.get("dense_mlp_idx", 0)
        dense = first if type(first) is int else 0
        found["mlp_layer_types"] = ["dense" if i < dense else "sparse" for i in layers]
    return found
