"""Architectures with latent attention. Needs no torch."""

from collections.abc import Mapping
from typing import Any

from formats.errors import CheckpointError
from formats.gguf.architectures.architecture import Architecture
from formats.gguf.architectures.layers import REMEDY, by_layer, dense_first
from formats.gguf.architectures.parts import (
    BEFORE,
    DENSE_FIRST,
    EXPERT_GROUPS,
    EXPERTS,
    OF_LATENTS,
    SHARED_EXPERTS,
    USUAL_ROUTING,
)

_DEEPSEEK = {
    **EXPERTS,
    "kv_lora_rank": "attention.kv_lora_rank",
    "n_routed_experts": "expert_count",
    **SHARED_EXPERTS,
    **DENSE_FIRST,
    **EXPERT_GROUPS,
}
# Attention that selects keys
_SELECTING: dict[str, Any] = {
    "norms": {**BEFORE, **OF_LATENTS, "indexer.k_norm": "self_attn.indexer.k_norm"},
    "linears": {
        "indexer.attn_q_b": "self_attn.indexer.wq_b",
        "indexer.attn_k": "self_attn.indexer.wk",
        "indexer.proj": "self_attn.indexer.weights_proj",
    },
    "keys": {
        **_DEEPSEEK,
        "index_n_heads": "attention.indexer.head_count",
        "index_head_dim": "attention.indexer.key_length",
        "index_topk": "attention.indexer.top_k",
    },
    "fixed": USUAL_ROUTING,
    "uncompared": ("first_k_dense_replace",),  # mlp_layer_types decides
}


def _selecting_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return no more metadata. Raises CheckpointError for indexers that llama.cpp does not run."""
    width = config["index_head_dim"]
    if width < 64 or width & (width - 1):
        raise CheckpointError(
            "config.json index_head_dim",
            f"expected a power of two from 64 on, as llama.cpp's Hadamard rotation, found {width}",
            REMEDY,
        )
    return {}


def _glm_config(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return GLM-5's layers with experts, and those with an indexer: all where a file is silent."""
    key, count = "attention.indexer.types", config["num_hidden_layers"]
    stated = [True] * count if metadata.get(key) is None else by_layer(metadata, key, count)
    return {
        **dense_first(metadata, config),
        "indexer_types": ["full" if each else "shared" for each in stated],
    }


def _glm_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return which of GLM-5's layers have an indexer."""
    _selecting_metadata(config)
    return {"attention.indexer.types": [kind == "full" for kind in config["indexer_types"]]}


def _mistral4_config(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return Mistral 4's width of heads, of which a part has RoPE, and its factor of scores."""
    rope = config["qk_rope_head_dim"]
    width = config["qk_nope_head_dim"] + rope
    scaling = {
        "rope_type": "default",
        **(config.get("rope_scaling") or {}),
        **{"rope_theta": config["rope_theta"], "partial_rotary_factor": rope / width},
        "llama_4_scaling_beta": float(metadata.number("attention.temperature_scale", 0.0)),
    }
    length = config["max_position_embeddings"]
    scaling.setdefault("original_max_position_embeddings", length)
    found = {"head_dim": width, "rope_parameters": scaling}
    return {**found, "rope_scaling": scaling} if "rope_scaling" in config else found


def _mistral4_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return Mistral 4's factor of scores, and the length from which on it grows."""
    scaling = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    beta = scaling.get("llama_4_scaling_beta")
    if not beta:
        return {}
    return {
        "attention.temperature_scale": float(beta),
        "attention.temperature_length": scaling["original_max_position_embeddings"],
    }


LATENTS = (
    # DeepSeek-V2, V3, R1, Moonlight, Kimi-K2, GLM-4.7-Flash
    Architecture(
        name="deepseek2",
        family="DeepseekV2ForCausalLM",
        with_sigmoid="DeepseekV3ForCausalLM",
        also=("Glm4MoeLiteForCausalLM",),
        without_experts="YoutuForCausalLM",
        norms={**BEFORE, **OF_LATENTS},
        keys=_DEEPSEEK,
        fixed=USUAL_ROUTING,
    ),
    Architecture(
        name="deepseek32",
        family="DeepseekV32ForCausalLM",
        more_config=dense_first,
        more_metadata=_selecting_metadata,
        **_SELECTING,
    ),
    Architecture(
        name="mistral4",
        family="Mistral4ForCausalLM",
        norms={**BEFORE, **OF_LATENTS},
        keys=_DEEPSEEK,
        fixed={**USUAL_ROUTING, "attention_bias": False},
        uncompared=("rope_parameters",),
        more_config=_mistral4_config,
        more_metadata=_mistral4_metadata,
    ),
    # GLM-5
    Architecture(
        name="glm-dsa",
        family="GlmMoeDsaForCausalLM",
        more_config=_glm_config,
        more_metadata=_glm_metadata,
        **_SELECTING,
    ),
    # llama.cpp has the factors in its code, and rotates halves
    Architecture(
        name="minicpm3",
        family="MiniCPM3ForCausalLM",
        norms={**BEFORE, **OF_LATENTS},
        keys={"kv_lora_rank": "attention.kv_lora_rank"},
        fixed={"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "mlp_bias": False},
        joins_kv_b=True,
    ),
)
