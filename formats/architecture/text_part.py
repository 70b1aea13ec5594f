"""The text model inside a vision-language checkpoint: its config.json and tensor names.

Such a checkpoint has the text model's config under `text_config`, and its tensors below a prefix.
Only the text model is read; the rest is ignored.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from formats.architecture.bare_model import INSTEAD_OF_HEAD, RANKER, SCORE_OFFSET
from formats.architecture.family import EITHER_ORDER, architecture_of
from formats.architecture.rope_types import one_axis
from formats.architecture.sizes import is_size
from formats.errors import config_error
from formats.families import FAMILIES

TEXT_CONFIG = "text_config"
LLM_CONFIG = "llm_config"  # the same key, used by code in a model's folder
LANGUAGE_CONFIG = "language_config"  # the same key in DeepSeek-OCR, without a model_type
THINKER_CONFIG = "thinker_config"  # Qwen-Omni's part that contains the text model
_BLOCK = "quantization_config"
_HEAD_MODULE = "lm_head"
_HEAD = f"{_HEAD_MODULE}."
_HEADS = (_HEAD, "output.")  # the second is InternLM2's
_NESTED = "language_model."  # prefix of files in which the head is part of the text model
_THINKER = "thinker."
_BACKBONE = "backbone."  # Nemotron-H's, instead of `model.`
HEAD_WEIGHT = "lm_head.weight"
RANKING = "JinaVLForRanking"
# Unlimited-OCR: queries attend to the whole prompt, but only to the last tokens of the output
WITH_OUTPUT_WINDOW = ("UnlimitedOCRForCausalLM", "UnlimitedOcrForConditionalGeneration")
# key that is added to the config: number of the output's tokens that queries attend to
OUTPUT_WINDOW = "output_window"
_WINDOW, _WINDOW_LAYER = "sliding_window", "reference_sliding_attention"
_INKLING = "InklingForConditionalGeneration"  # files may leave out the model_type of its text part
# architectures that contain a text model
WRAPPERS = (
    "AyaVisionForConditionalGeneration",
    "Cohere2VisionForConditionalGeneration",
    "Cosmos3ForConditionalGeneration",
    "Cosmos3OmniForConditionalGeneration",
    "DeepseekOCR2ForCausalLM",
    "DeepseekOcr2ForConditionalGeneration",
    "DeepseekOCRForCausalLM",
    "DeepseekVLForConditionalGeneration",
    "Ernie4_5_VLMoeForConditionalGeneration",
    "Ernie4_5_VL_MoeForConditionalGeneration",
    "Exaone4_5_ForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "Glm46VForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
    "GlmOcrForConditionalGeneration",
    "GotOcr2ForConditionalGeneration",
    "HCXVisionV2ForCausalLM",
    "HunYuanVLForConditionalGeneration",
    "HyperCLOVAXVisionV2ForConditionalGeneration",
    "Idefics2ForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "InternS2PreviewForConditionalGeneration",
    "InternVLChatModel",
    "InternVLForConditionalGeneration",
    "JanusForConditionalGeneration",
    RANKING,
    "Kimi_K25ForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "KimiVLForConditionalGeneration",
    "Lfm2VlForConditionalGeneration",
    "Lfm3VlForConditionalGeneration",
    "LightOnOcrForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "MiniCPMOcrForConditionalGeneration",
    "MiniCPMV4_6ForConditionalGeneration",
    "MiniMaxM3SparseForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "MuseGlimmerForConditionalGeneration",
    "NemotronH_Nano_Omni_Reasoning_V3",
    "NemotronH_Omni_Reasoning_V3",
    "PaddleOCRVLForConditionalGeneration",
    "PaliGemmaForConditionalGeneration",
    "Phi4MMForCausalLM",
    "Phi4MultimodalForCausalLM",
    "QianfanOCRForConditionalGeneration",
    "Qwen2_5OmniForConditionalGeneration",
    "Qwen2_5OmniModel",
    "Qwen2_5OmniThinkerForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration",
    "Qwen3OmniMoeThinkerForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
    "Step3p7ForConditionalGeneration",
    *WITH_OUTPUT_WINDOW,
    "VideoLlama3ForConditionalGeneration",
    "VipLlavaForConditionalGeneration",
    # served as text models only
    "Cosmos3EdgeForConditionalGeneration",
    "Dots3NoteForCausalLM",
    "Dots3NoteForConditionalGeneration",
    "DeepseekVLHybridForConditionalGeneration",
    "Gemma3nForConditionalGeneration",
    "Granite4VisionForConditionalGeneration",
    "GraniteDoclingForConditionalGeneration",
    "GraniteSpeechForConditionalGeneration",
    _INKLING,
    "InternS1ForConditionalGeneration",
    "LlavaNextVideoForConditionalGeneration",
    "MiMoV2ForCausalLM",
    "MiniCPMV4_7ForConditionalGeneration",
    "NemotronH_Nano_VL_V2",
    "Ovis2ForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
    "VideoLlavaForConditionalGeneration",
    "VoxtralForConditionalGeneration",
)
_DEEPSEEK = "deepseek"  # model_type of DeepSeek-OCR's text part
# model_type of a text part -> model_type of the text model with the same layers
_SAME_LAYERS = {
    "cosmos3_edge_text": "arcee",
    "deepseek_ocr2_text": "deepseek",
    "dots3_note": "dots3_note_text",
    "ernie4_5_moe_vl": "ernie4_5_vl_moe_text",
    "gemma4_unified_text": "gemma4_text",
    "glm4v_moe_text": "glm4_moe",
    "glm4v_text": "glm4",
    "glm_ocr_text": "glm4",
    "granite4_vision_text": "granite",
    "granite_docling_text": "granite",
    "hunyuan_vl": "hunyuan_v1_dense",
    "hunyuan_vl_text": "hunyuan_v1_dense",
    "intern_s2_preview_text": "qwen3_5_moe_text",
    "interns2_preview_text": "qwen3_5_moe_text",
    "kimi_k2": "deepseek_v3",
    "mimo_v2": "mimo_v2_flash",
    "minimax_m3": "minimax_m3_vl_text",
    "paddleocr_vl": "llama",
    "paddleocr_vl_text": "llama",
    "phi4_multimodal": "phi3",
    "phi4mm": "phi3",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_5_omni_text": "qwen2",
    "qwen3_omni_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
    "unlimited_ocr_text": "deepseek",
    "qwen3_vl_moe_text": "qwen3_moe",
}
# prefix in the file -> prefix in the text model; the first match counts
_PREFIXES = {
    "language_model.model.": "model.",
    **{f"language_model.{head}": head for head in _HEADS},
    "language_model.backbone.": _BACKBONE,
    f"{_THINKER}model.": "model.",
    f"{_THINKER}{_HEAD}": _HEAD,
    "model.language_model.model.": "model.",  # HyperCLOVA X
    "model.language_model.lm_head.": _HEAD,
    "model.language_model.": "model.",
    "model.text_model.": "model.",
}
_PART_NAMES = ("vision_tower", "multi_modal_projector", "vision_model", "connector", "visual")
_PART_NAMES += ("embed_vision", "audio_tower", "embed_audio", "mm_projector", "merger", "mlp1")
_PART_NAMES += ("sound_encoder", "sound_projection", "image_tower", "video_tower")
_PART_NAMES += ("vit_large_projector", "vision_encoder", "vision_projection")
_PART_NAMES += ("embed_tokens_extend", "aligner", "mlp_AR", "projector", "time_series")
_PART_NAMES += ("vision_embedder", "vision_adapter", "audio_encoder", "speech_embeddings")
_PART_NAMES += ("audio", "vision_projector")
_PART_NAMES += ("talker", "token2wav", "code2wav")
# of Granite Speech, Granite 4 Vision, Granite Docling, Ovis 2 and DeepSeek-VL 7B
_PART_NAMES += ("encoder", "layerwise_projectors", "spatial_projectors", "density_router")
_PART_NAMES += ("visual_embeddings_table", "high_res_vision_model", "high_res_vision_neck")
_PART_NAMES += ("high_res_vision_proj",)
# Janus' generator of images
_PART_NAMES += ("vqmodel", "generation_embeddings", "generation_aligner", "generation_head")
_ALSO_INSIDE = ("encoder",)  # parts with a name that modules of other parts have, too
# parts whose modules transformers names otherwise, in quantization blocks, too
_IN_TRANSFORMERS = {
    "mlp_AR": "projector",
    "vision_embedder": "embed_vision",
    "sam_model": "vision_tower",
    "qwen2_model": "vision_tower",
    "vit": "vision_tower",
    "patch_merge_mlp": "multi_modal_projector",
    "mlp1": "multi_modal_projector",
    "sound_encoder": "audio_tower",
    "sound_projection": "embed_audio",
}
_PART_NAMES += ("sam_model", "qwen2_model", "vit", "resampler_model", "patch_merge_mlp")
# tensors outside of any part: LLaVA-NeXT's, DeepSeek-OCR's and DeepSeek-VL 7B's
_LONE_TENSORS = ("image_newline", "view_seperator", "view_separator", "high_res_vision_alpha")
# prefixes of the other parts
_OTHER_PARTS = tuple(
    f"{parent}{part}." for parent in ("", "model.", _THINKER) for part in _PART_NAMES
)
# model types without a text_config
_FLAT = (
    "ernie4_5_moe_vl",
    "hunyuan_vl",
    "qwen2_5_vl",
    "qwen2_vl",
    "phi4_multimodal",
    "phi4mm",
    "paddleocr_vl",
    "mimo_v2",
    "dots3_note",
)
_OTHER_CONFIGS = ("vision_config", "audio_config")
# Phi4MMForCausalLM: adapters inside of the model, for images and for sounds, next to the weights
_ADAPTERS, _ADAPTED = (".lora_A.", ".lora_B."), ".base_layer."
_DOT = r"\\?\."  # a dot in a name, or in a pattern of names
# modules of the text model that have linears
_WITH_LINEARS = "layers|per_layer_model_projection"
_ROPES = ("rope_parameters", "rope_scaling")
# keys that default to the values of the whole model
_SHARED = (
    *("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id"),
    *(_BLOCK, "transformers_version"),
)
# fixed behavior of a text part's layers, as keys of the model with the same layers
_ALWAYS = {
    "qwen3_vl_moe_text": {"norm_topk_prob": True, EITHER_ORDER: True},
    "gemma4_unified_text": {"hidden_size_per_layer_input": 0, "enable_moe_block": False},
    "glm4v_text": {"attention_bias": True},
    "glm_ocr_text": {"attention_bias": False},
    "glm4v_moe_text": {"use_qk_norm": False},
}
# the same for text parts of one architecture
_ALWAYS_OF = {
    # bidirectional only in prompts with images
    "PaliGemmaForConditionalGeneration": {"use_bidirectional_attention": None},
    # the code in jina-reranker-m0's folder subtracts 2.65 from each score
    RANKING: {INSTEAD_OF_HEAD: RANKER, SCORE_OFFSET: -2.65},
}
_OF_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
# transformers' defaults, which published files leave out
_DEFAULTS = {
    "glm4v_text": {"partial_rotary_factor": 1.0},
    "glm_ocr_text": {"partial_rotary_factor": 1.0},
    "glm4v_moe_text": {"attention_bias": True},
    "qwen3_omni_moe_text": {"norm_topk_prob": True},
    "cosmos3_edge_text": {"head_dim": 128, "num_key_value_heads": 8},
    "paddleocr_vl": {"head_dim": 128, "num_key_value_heads": 2},
    "paddleocr_vl_text": {"head_dim": 128, "num_key_value_heads": 2},
    # LLaVA-1.5: its text_config names the model that it was trained from
    "llama": _OF_LLAMA,
    # Qwen2-Audio
    "qwen2": {
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    # Granite Speech, Granite 4 Vision
    **dict.fromkeys(("granite", "granite4_vision_text"), _OF_LLAMA),
    "granite_docling_text": {
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
    # Idefics2, LLaVA-NeXT
    "mistral": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
    },
}


def has_text_part(config: Mapping[str, Any]) -> bool:
    """Return True for the config.json of a multimodal model with a known text model."""
    text = _stated_text(config)
    is_wrapper = architecture_of(config) in WRAPPERS
    return is_wrapper and isinstance(text, dict) and bool(_architecture(text))


def text_config(config: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the config.json of the text model; other configs are unchanged.

    `names` are the text model's tensors. They decide whether there is a head, because the whole
    model and its text model may disagree on tying.
    """
    if not has_text_part(config):
        return config
    text = _stated_text(config)
    shared = {key: config[key] for key in _SHARED if key in config}
    if _BLOCK in shared:
        shared[_BLOCK] = text_block(shared[_BLOCK])
    defaults = _DEFAULTS.get(text["model_type"], {})
    for key in _ROPES:
        if isinstance(text.get(key), dict):
            text = {**text, key: one_axis(text[key])}
    has_head = any(name.startswith(_HEADS) for name in names)
    return {
        **shared,
        **defaults,
        **_head_dim(text),
        **text,
        **_ALWAYS.get(text["model_type"], {}),
        **_ALWAYS_OF.get(architecture_of(config) or "", {}),
        **_output_window(config, text),
        "model_type": _model_type(text),
        "architectures": [_architecture(text)],
        "tie_word_embeddings": not has_head,
    }


def text_name(name: str) -> str | None:
    """Return a tensor's name in the text model; None: it belongs to another part."""
    if name.startswith(_OTHER_PARTS) or name.removeprefix("model.") in _LONE_TENSORS:
        return None
    if any(part in name for part in _ADAPTERS):
        return None
    name = name.replace(_ADAPTED, ".")
    for prefix, own in _PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name


def text_prefix(names: Iterable[str]) -> str:
    """Return the prefix that stored names of the text model have instead of `model.`."""
    for name in names:
        for prefix, own in _PREFIXES.items():
            if own not in _HEADS and name.startswith(prefix):
                return prefix
    return "model."


def stored_name(name: str, prefix: str) -> str:
    """Return the stored name of a tensor of the text model; the inverse of `text_name`."""
    if name.startswith(_HEADS):
        return f"{_parent(prefix)}{name}"
    own = _PREFIXES.get(prefix, "model.")
    return prefix + name.removeprefix(own) if name.startswith(own) else name


def other_part_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the model's other parts that these tensors belong to, such as `vision_tower`."""
    words = set()
    for name in names:
        first, *rest = name.split(".")[:2]
        is_part = first in _PART_NAMES
        words |= {first, *(word for word in rest if not (is_part and word in _ALSO_INSIDE))}
    words |= {_IN_TRANSFORMERS[word] for word in words & _IN_TRANSFORMERS.keys()}
    return tuple(part for part in _PART_NAMES if part in words)


def stored_block(block: dict[str, Any], prefix: str, parts: Sequence[str]) -> dict[str, Any]:
    """Return the quantization block of the whole model: stored names, other parts in float."""
    stored = r"\1".join(prefix.split("."))  # \1: the dot that _DOT matched, escaped or not
    own = _PREFIXES.get(prefix, "model.").rstrip(".")
    found = _renamed(block, rf"(?<![\w.]){own}({_DOT})(?={_WITH_LINEARS})", stored)
    if "ignore" in found:
        ignored = list(found["ignore"] or ())
        if _parent(prefix) and _HEAD_MODULE in ignored:
            # transformers names the head of some of these models as the file does (Llama 4)
            ignored.insert(ignored.index(_HEAD_MODULE) + 1, f"re:.*{_HEAD_MODULE}")
        found["ignore"] = [*ignored, *(f"re:.*{part}.*" for part in parts)]
    elif "modules_to_not_convert" in found:
        found["modules_to_not_convert"] = [*(found["modules_to_not_convert"] or ()), *parts]
    elif found.get("quant_method") == "gptq":
        skipped = {f"-:.*{part}.*": {} for part in parts}
        found["dynamic"] = {**(found.get("dynamic") or {}), **skipped}
    return found


def text_block(block: Any) -> Any:
    """Return a quantization block with the text model's names; the inverse of `stored_block`."""
    for prefix, own in _PREFIXES.items():
        if own not in _HEADS:
            stored, kept = _DOT.join(prefix[:-1].split(".")), own.rstrip(".")
            pattern = rf"(?<![\w.]){stored}({_DOT})(?={_WITH_LINEARS})"
            block = _renamed(block, pattern, rf"{kept}\1")
    return block


def _parent(prefix: str) -> str:
    """Return the prefix of the head in files whose text model has this prefix."""
    return next((each for each in (_NESTED, _THINKER) if prefix.startswith(each)), "")


def _renamed(value: Any, pattern: str, by: str) -> Any:
    if isinstance(value, str):
        return re.sub(pattern, by, value)
    if isinstance(value, list):
        return [_renamed(each, pattern, by) for each in value]
    if isinstance(value, dict):
        return {
            _renamed(key, pattern, by): _renamed(each, pattern, by) for key, each in value.items()
        }
    return value


def _stated_text(config: Mapping[str, Any]) -> Any:
    """Return the text model's config; some models have its keys next to `vision_config`."""
    thinker = config.get(THINKER_CONFIG)
    if isinstance(thinker, dict):
        return thinker.get(TEXT_CONFIG)
    text = config.get(TEXT_CONFIG, config.get(LLM_CONFIG))
    if isinstance(text, dict) and architecture_of(config) == _INKLING:
        return {"model_type": "inkling_text", **text}
    language = config.get(LANGUAGE_CONFIG)
    if text is None and isinstance(language, dict):
        return {"model_type": _DEEPSEEK, **language} if language.get("use_mla") is False else None
    if text is None and config.get("model_type") in _FLAT:
        return {key: value for key, value in config.items() if key not in _OTHER_CONFIGS}
    return text


def _output_window(config: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attention window of output tokens, instead of windows of layers.

    Raises CheckpointError.
    """
    if architecture_of(config) not in WITH_OUTPUT_WINDOW:
        return {}
    window = text.get(_WINDOW, config.get(_WINDOW, 128))
    if not is_size(window):
        raise config_error(_WINDOW, "a number above 0", window)
    kinds = text.get("layer_types") or [_WINDOW_LAYER]
    if set(kinds) != {_WINDOW_LAYER}:
        raise config_error("layer_types", f"only {_WINDOW_LAYER}", kinds)
    return {OUTPUT_WINDOW: window, _WINDOW: None, "layer_types": None}


def _head_dim(text: Mapping[str, Any]) -> dict[str, int]:
    """Return head_dim of GLM's vision models: their default differs from the text models'."""
    hidden, heads = text.get("hidden_size"), text.get("num_attention_heads")
    is_glm = text["model_type"] in ("glm4v_text", "glm4v_moe_text", "glm_ocr_text")
    return {"head_dim": hidden // heads} if is_glm and is_size(hidden) and is_size(heads) else {}


def _model_type(text: Mapping[str, Any]) -> Any:
    stated = text.get("model_type")
    return _SAME_LAYERS.get(stated, stated) if isinstance(stated, str) else stated


def _architecture(text: Mapping[str, Any]) -> str:
    for family in FAMILIES.values():
        if family.model_type == _model_type(text):
            return family.architecture
    return ""
