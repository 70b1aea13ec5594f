"""Derive the canonical keys of config.json from what published files state."""

from collections.abc import Callable, Mapping
from typing import Any

from formats.architecture.family import architecture_of
from formats.architecture.rows.step import step_keys
from formats.architecture.rows.uneven import laguna_heads
from formats.architecture.stored_form import (
    classics,
    deepseek_v4,
    dots,
    gemma,
    hybrids,
    latent,
    mamba,
    mixtures,
    own_code,
    parts,
)
from formats.architecture.stored_form.mimo import mimo_v2
from formats.families import family_of

_UNIFIED = "gemma4_unified_text"  # text model of Gemma 4 12B
_UNLIKE_GEMMA_4 = {"hidden_size_per_layer_input": 0, "enable_moe_block": False}
_UNIFIED_DEFAULTS = {"sliding_window": 1024, "max_position_embeddings": 262144}
# model_type -> model_type of the family with the same layers
_SAME_LAYERS = {
    **{"kimi_k2": "deepseek_v3", "internlm3": "llama", "iquestcoder": "llama"},
    **{"minimax_text_01": "minimax", "minimax_m1": "minimax", "minicpm": "granite"},
    "AXK1": "axk1",
    **{"minimax_m3": "minimax_m3_vl_text", "dots3_note": "dots3_note_text"},
    _UNIFIED: "gemma4_text",
    **{
        "jina_embeddings_v5": "qwen3",
        "mimo": "qwen2",
        "orion": "stablelm",
        "mimo_v2": "mimo_v2_flash",
    },
    **dict.fromkeys(("internlm", "aquila", "xverse"), "llama"),
    **dict.fromkeys(("telechat3", "PanguEmbedded"), "llama"),
}
_ROPES = ("rope_parameters", "rope_scaling")
# model_type -> keys whose values in the file are written again, because other programs read them
_KEPT = {"telechat3": _ROPES, "sarvam_mla": (*_ROPES, "head_dim")}
# architecture of code in a model's folder -> transformers' architecture for the same files
_SAME_FILES = {
    "MPTForCausalLM": "MptForCausalLM",
    "InternLM3ForCausalLM": "LlamaForCausalLM",
    "IQuestCoderForCausalLM": "LlamaForCausalLM",
    "MiniMaxText01ForCausalLM": "MiniMaxForCausalLM",
    "MiniMaxM1ForCausalLM": "MiniMaxForCausalLM",
    "MiniMaxM3SparseForCausalLM": "MiniMaxM3VLForCausalLM",
    "MiniCPMForCausalLM": "GraniteForCausalLM",
    "MiMoForCausalLM": "Qwen2ForCausalLM",
    "Gemma4UnifiedForCausalLM": "Gemma4ForCausalLM",
    "MiMoV2ForCausalLM": "MiMoV2FlashForCausalLM",
    "BailingMoeV3ForCausalLM": "BailingHybridForCausalLM",
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "JinaEmbeddingsV5Model": "Qwen3Model",
    "PLaMo2ForCausalLM": "Plamo2ForCausalLM",
    "PLaMo3ForCausalLM": "Plamo3ForCausalLM",
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
    "OrionForCausalLM": "StableLmForCausalLM",
    **dict.fromkeys(
        ("InternLMForCausalLM", "AquilaForCausalLM", "XverseForCausalLM"), "LlamaForCausalLM"
    ),
    **dict.fromkeys(
        ("TeleChat3ForCausalLM", "Telechat3ForCausalLM", "PanguEmbeddedForCausalLM"),
        "LlamaForCausalLM",
    ),
}
# model_type -> function that derives the keys for which a new name is not enough
_DERIVED_KEYS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "granite": classics.minicpm,
    "gpt2": parts.inner_width("n_inner"),
    "gptj": parts.inner_width("n_inner"),
    "codegen": parts.inner_width("n_inner"),
    "gpt_neo": classics.gpt_neo,
    "gpt_bigcode": classics.gpt_bigcode,
    "falcon": classics.falcon,
    "cohere2_moe": mixtures.cohere_moe,
    "ernie4_5_moe": mixtures.ernie_moe,
    "ernie4_5_vl_moe_text": mixtures.ernie_vl,
    "minimax_m3_vl_text": mixtures.minimax_m3,
    "deepseek_v2": latent.query_rank(1536),
    "deepseek_v3": latent.query_rank(1536),
    "deepseek_v32": latent.selecting(1536, 64),
    "deepseek_v4": deepseek_v4.keys,
    "dots3_note_text": dots.dots3,
    "glm_moe_dsa": latent.selecting(2048, 32),
    "olmo_hybrid": hybrids.olmo_hybrid,
    "kimi_linear": hybrids.kimi_linear,
    "bailing_hybrid": hybrids.bailing_hybrid,
    "bailing_moe_linear": hybrids.lightning_ling,
    "minimax": hybrids.minimax,
    "glm4_moe_lite": latent.glm_lite,
    "exaone_moe": parts.expert_layers,
    "hy_v3": parts.expert_layers,
    "youtu": latent.query_rank(1536),
    "axk1": latent.axk1,
    "sarvam_mla": latent.sarvam,
    "afmoe": mixtures.afmoe,
    "minicpm3": latent.minicpm3,
    "mistral4": latent.query_rank(1024),
    "lfm2": hybrids.lfm2,
    "lfm2_moe": hybrids.lfm2_moe,
    "lfm3": hybrids.lfm3,
    "inkling_text": hybrids.inkling,
    "granitemoehybrid": hybrids.granite_hybrid,
    "falcon_h1": hybrids.mamba,
    "bamba": hybrids.mamba,
    "nemotron_h": hybrids.nemotron_h,
    "mamba": mamba.mamba,
    "falcon_mamba": mamba.mamba,
    "mamba2": mamba.mamba_2,
    "jamba": mamba.jamba,
    "hunyuan_v1_moe": mixtures.hunyuan_moe,
    "laguna": laguna_heads,
    "mimo_v2_flash": mimo_v2,
    "step3p5": step_keys,
    "llama4_text": mixtures.llama4,
    "gemma3n_text": gemma.gemma3n,
    "gemma4_text": gemma.gemma4,
    "llama": own_code.llama_like,
    "stablelm": own_code.orion,
    "exaone": own_code.exaone,
    "baichuan": own_code.baichuan,
    "qwen": own_code.qwen,
    "bailing_moe": own_code.bailing,
    "sarvam_moe": own_code.sarvam,
    "plamo2": own_code.plamo_2,
    "plamo3": own_code.plamo_3,
    "bloom": classics.bloom,
    "mpt": classics.mpt,
}


def canonical_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the canonical keys added to the family's own.

    Values that transformers derives are filled in, too. A config of an unknown family is unchanged.
    """
    config = _canonical_type(config)
    family = family_of(config)
    if family is None:
        return config
    own = family.config_keys
    found = {canonical: config[key] for canonical, key in own.items() if key in config}
    config = {**config, **found} if found else config
    derive = _DERIVED_KEYS.get(family.model_type)
    return config if derive is None else {**config, **derive(config)}


def replaced_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json that `canonical_config` replaces, with the file's values."""
    kept = _KEPT.get(str(config.get("model_type")), ())
    return {key: config[key] for key in (*_same(config), *kept) if key in config}


def _canonical_type(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the names of the family that has the same layers or files."""
    same = _same(config)
    return {**config, **same} if same else config


def _same(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return new values of the keys that name the family, if it is read as another family."""
    model_type, name = config.get("model_type"), architecture_of(config)
    found: dict[str, Any] = {}
    if isinstance(model_type, str) and model_type in _SAME_LAYERS:
        found["model_type"] = _SAME_LAYERS[model_type]
    if model_type == _UNIFIED:
        found |= _UNLIKE_GEMMA_4 | {key: config.get(key, n) for key, n in _UNIFIED_DEFAULTS.items()}
    if name in _SAME_FILES:
        found["architectures"] = [_SAME_FILES[name]]
    return found
