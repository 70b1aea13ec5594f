"""Gemma 3n and Gemma 4: inputs of layers, layers that share keys and values, heads of two widths.

llama.cpp has several sizes of Gemma 3n in its code; models with others are not written.
"""

import statistics
from collections.abc import Mapping
from typing import Any

from formats.errors import CheckpointError
from formats.gguf.architectures.architecture import Architecture
from formats.gguf.architectures.layers import REMEDY, by_layer
from formats.gguf.architectures.parts import AROUND, EXPERTS, FREQUENCIES, GELU, OF_HEADS
from formats.gguf.writing.container_writer import Value

SPARSITY = "activation_sparsity_scale"
SHARED = "attention.shared_kv_layers"
_NORMS = {**AROUND, **OF_HEADS, "post_norm": "post_per_layer_input_norm"}
_KEYS = {
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "num_kv_shared_layers": SHARED,
    "final_logit_softcapping": "final_logit_softcapping",
}
# In llama.cpp's code: layers with keys and values of their own; layers whose activations are
# sparse, the first ones, and how sparse
OWN_LAYERS, SPARSE_LAYERS, SPARSE = 20, 10, 0.95
_NORMAL = statistics.NormalDist()
STILL = 1e30  # divisor of the frequencies of pairs that do not rotate


def _gemma3n_config(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return sizes that tensors show, and the share of inactive channels in each layer."""
    tensors, layers = metadata.gguf.tensors, config["num_hidden_layers"]
    scales = metadata.gguf.metadata.get(f"{metadata.architecture.name}.{SPARSITY}")
    numbers = [0.0] * layers if scales is None else list(scales)
    if len(numbers) != layers or not all(isinstance(each, float | int) for each in numbers):
        raise metadata.wrong(SPARSITY, f"expected {layers} numbers")
    return {
        "laurel_rank": _rows(tensors, "blk.0.laurel_l.weight", metadata),
        **_of_layer_inputs(metadata),
        "activation_sparsity_pattern": [
            round(_NORMAL.cdf(each), 6) if each > -1e30 else 0.0 for each in numbers
        ],
    }


def _of_layer_inputs(metadata: Any) -> dict[str, Any]:
    table = "per_layer_token_embd.weight"
    return {"vocab_size_per_layer_input": _rows(metadata.gguf.tensors, table, metadata)}


def _rows(tensors: Mapping[str, Any], name: str, metadata: Any) -> int:
    """Return the number of rows of a matrix. Raises CheckpointError if it is missing."""
    if name not in tensors:
        raise CheckpointError(
            f"{metadata.subject}: {name}", "is missing", "download the file again"
        )
    return tensors[name].shape[0]


def _gemma3n_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the thresholds of activations. Raises CheckpointError for sizes that differ from
    llama.cpp's.
    """
    layers, shared = config["num_hidden_layers"], config.get("num_kv_shared_layers", 15)
    if layers - shared != OWN_LAYERS:
        raise CheckpointError(
            "config.json num_kv_shared_layers",
            f"expected {OWN_LAYERS} layers with keys and values of their own in gemma3n,"
            f" found {layers - shared}",
            REMEDY,
        )
    _check_sources(config)
    shares = config.get("activation_sparsity_pattern")
    usual = [SPARSE if i < SPARSE_LAYERS else 0.0 for i in range(layers)]
    if shares is not None and shares != usual:
        raise CheckpointError(
            "config.json activation_sparsity_pattern",
            f"expected {SPARSE} in the first {SPARSE_LAYERS} layers of gemma3n and 0.0 in the"
            f" others, found {shares!r:.60}",
            REMEDY,
        )
    scales = [_NORMAL.inv_cdf(each) if each else -float("inf") for each in usual]
    return {SPARSITY: Value(type="f32", value=scales)}


def _check_sources(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless layers share the keys and values that llama.cpp takes: those of
    the last two layers with their own, the first of which has a window and the second has not.
    """
    kinds, shared = config["layer_types"], config.get("num_kv_shared_layers") or 0
    found = kinds[: len(kinds) - shared][-2:]
    if shared and found != ["sliding_attention", "full_attention"]:
        raise CheckpointError(
            "config.json layer_types",
            "expected a layer with a window and one without before the layers that share keys and"
            f" values, found {found}",
            REMEDY,
        )


def _gemma4_stated(metadata: Any) -> Mapping[str, Any]:
    """Return whether there are experts next to the feed-forward."""
    return {"enable_moe_block": bool(metadata.get("expert_count"))}


def _gemma4_experts(metadata: Any) -> dict[str, Any]:
    """Return the sizes of experts, if there are any. Raises CheckpointError."""
    if not _gemma4_stated(metadata)["enable_moe_block"]:
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts_per_tok": metadata.size("expert_used_count"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
    }


def _gemma4_config(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the sizes of layers with a window and of layers with full attention."""
    layers, shared = config["num_hidden_layers"], config.get("num_kv_shared_layers", 0)
    is_full = [kind == "full_attention" for kind in config["layer_types"]]
    kv_heads = by_layer(metadata, "attention.head_count_kv", layers, sizes=True)
    widths = by_layer(metadata, "feed_forward_length", layers, sizes=True)
    local, full = (
        next((heads for i, heads in enumerate(kv_heads) if is_full[i] == kind), kv_heads[0])
        for kind in (False, True)
    )
    wide = [widths[0] if i < layers - shared else 2 * widths[0] for i in range(layers)]
    is_wide = shared > 0 and widths == wide
    if not is_wide and len(set(widths)) > 1:
        raise metadata.wrong("feed_forward_length", f"expected one width, found {widths!r:.60}")
    own = [f"blk.{i}.attn_v.weight" for i in range(layers - shared) if is_full[i]]
    has_inputs = bool(config.get("hidden_size_per_layer_input"))
    return {
        "head_dim": metadata.size("attention.key_length_swa", config["head_dim"]),
        "global_head_dim": config["head_dim"],
        "num_key_value_heads": local,
        "num_global_key_value_heads": full,
        "attention_k_eq_v": any(name not in metadata.gguf.tensors for name in own),
        "use_double_wide_mlp": is_wide,
        **_gemma4_experts(metadata),
        **(_of_layer_inputs(metadata) if has_inputs else {}),
    }


def _gemma4_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return sizes by layer. Raises CheckpointError for what llama.cpp has no form for."""
    _check_sources(config)
    layers, shared = config["num_hidden_layers"], config.get("num_kv_shared_layers") or 0
    is_full = [kind == "full_attention" for kind in config["layer_types"]]
    local, full = config["num_key_value_heads"], config["num_global_key_value_heads"]
    width, factor = config["intermediate_size"], 1 + bool(config.get("use_double_wide_mlp"))
    sizes = {
        "attention.key_length": config["global_head_dim"],
        "attention.value_length": config["global_head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.head_count_kv": [full if each else local for each in is_full],
        "feed_forward_length": [
            width if i < layers - shared else factor * width for i in range(layers)
        ],
        SHARED: shared,
        "embedding_length_per_layer_input": config.get("hidden_size_per_layer_input") or 0,
    }
    return {key: Value(type="u32", value=value) for key, value in sizes.items()}


def _gemma4_rope_config(metadata: Any) -> Mapping[str, Any]:
    """Return the RoPE parameters of both layer types.

    In layers with full attention, only the first pairs of channels have RoPE.
    """
    width = metadata.size("attention.key_length")
    divisors = metadata.divisors(FREQUENCIES, width, most=float("inf"))
    num_rotary = sum(each == 1.0 for each in divisors)
    if divisors != [1.0] * num_rotary + [divisors[-1]] * (len(divisors) - num_rotary):
        raise metadata.wrong(
            "rope_freqs", "expected ones, then equal divisors of pairs without RoPE"
        )
    theta = metadata.number("rope.freq_base", 1e6)
    local = metadata.number("rope.freq_base_swa", 1e4)
    return {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": float(theta),
                "partial_rotary_factor": num_rotary / len(divisors),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": float(local)},
        }
    }


def _gemma4_rope_metadata(
    config: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Return the RoPE parameters of both layer types. Raises CheckpointError for others."""
    stated = config.get("rope_parameters") or {}
    full = stated.get("full_attention", {"rope_type": "proportional"})
    local = stated.get("sliding_attention", {})
    for parameters, expected in ((full, "proportional"), (local, "default")):
        found = parameters.get("rope_type", expected)
        if found != expected:
            raise CheckpointError(
                "config.json rope_parameters", f"expected {expected!r}, found {found!r}", REMEDY
            )
    width = config["global_head_dim"]
    turning = int(width * full.get("partial_rotary_factor", 0.25) / 2)
    keys = {
        "rope.freq_base": Value(type="f32", value=float(full.get("rope_theta", 1e6))),
        "rope.freq_base_swa": Value(type="f32", value=float(local.get("rope_theta", 1e4))),
        "rope.dimension_count": Value(type="u32", value=width),
        "rope.dimension_count_swa": Value(type="u32", value=config["head_dim"]),
    }
    return keys, {FREQUENCIES: [1.0] * turning + [STILL] * (width // 2 - turning)}


GEMMAS = (
    Architecture(
        name="gemma3n",
        family="Gemma3nForCausalLM",
        norms={
            **_NORMS,
            "altup_router_norm": "altup.router_norm",
            "laurel_post_norm": "laurel.post_laurel_norm",
        },
        tensors={
            "altup_correct_coef.weight": "altup.correction_coefs.weight",
            "altup_correct_scale.weight": "altup.correct_output_scale",
            "altup_predict_coef.weight": "altup.prediction_coefs.weight",
            "altup_router.weight": "altup.modality_router.weight",
            "laurel_l.weight": "laurel.linear_left.weight",
            "laurel_r.weight": "laurel.linear_right.weight",
        },
        keys={
            **_KEYS,
            "altup_active_idx": "altup.active_idx",
            "altup_num_inputs": "altup.num_inputs",
        },
        fixed={**GELU, "rope_local_base_freq": 10000.0, "final_logit_softcapping": 30.0},
        needs={
            **{"altup_num_inputs": 4, "altup_active_idx": 0, "laurel_rank": 64},
            **{"hidden_size_per_layer_input": 256, "final_logit_softcapping": 30.0},
        },
        window="pattern",
        pattern=5,
        fills_shared_layers=True,
        more_config=_gemma3n_config,
        more_metadata=_gemma3n_metadata,
    ),
    Architecture(
        name="gemma4",
        family="Gemma4ForCausalLM",
        norms={
            **_NORMS,
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
        },
        tensors={
            "layer_output_scale.weight": "layer_scalar",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
        },
        keys={**_KEYS, **EXPERTS, "num_experts": "expert_count"},
        fixed={**GELU, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
        joins_gate_up=True,
        stated=_gemma4_stated,
        window="pattern",
        pattern=6,
        sizes_by_layer=True,
        more_config=_gemma4_config,
        more_metadata=_gemma4_metadata,
        rope_config=_gemma4_rope_config,
        rope_metadata=_gemma4_rope_metadata,
    ),
)
