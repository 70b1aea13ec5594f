"""Configs of whole models around the text models of tiny families: with images or sounds."""

import transformers

from tests.tiny_families import GEMMA, TINY, TINY_FAMILIES

VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 32,
    "patch_size": 16,
}
TEXT = {key: value for key, value in TINY.items() if key != "tie_word_embeddings"}


def gemma():
    text = {**TEXT, **GEMMA, "model_type": "gemma3_text"}
    return transformers.Gemma3Config(
        text_config=text, vision_config=VISION, mm_tokens_per_image=4, image_token_index=511
    )


def mistral():
    return transformers.Mistral3Config(
        text_config={**TEXT, "model_type": "mistral", "head_dim": 32, "sliding_window": None},
        vision_config={**VISION, "model_type": "pixtral", "head_dim": 16},
        image_token_index=511,
    )


def llama4():
    """Experts of its text model are in one tensor for all of a layer, below a prefix."""
    vision = {"intermediate_size": 64, "vision_output_dim": 64, "projector_input_dim": 64}
    vision["projector_output_dim"] = 64
    return transformers.Llama4Config(
        text_config={**TEXT, **TINY_FAMILIES["llama4"][1], "model_type": "llama4_text"},
        vision_config={**VISION, **vision},
    )


def gemma4():
    vision = {"num_key_value_heads": 1, "head_dim": 16, "position_embedding_size": 8}
    return transformers.Gemma4Config(
        text_config={
            **{**TEXT, **TINY_FAMILIES["gemma4"][1], "model_type": "gemma4_text"},
            "use_bidirectional_attention": "vision",
        },
        vision_config={**VISION, **vision, "pooling_kernel_size": 1},
        audio_config=None,
        tie_word_embeddings=True,
    )


def gemma4_shared():
    """E2B: per-layer embeddings, and layers without keys of their own."""
    whole = gemma4()
    text = {**TEXT, **TINY_FAMILIES["gemma4_shared"][1], "model_type": "gemma4_text"}
    return transformers.Gemma4Config(
        text_config=text,
        vision_config=whole.vision_config,
        audio_config=None,
        tie_word_embeddings=True,
    )


def mistral4():
    """Mistral Small 4: its text model has latent attention and experts."""
    return transformers.Mistral3Config(
        text_config={**TEXT, **TINY_FAMILIES["mistral4"][1], "model_type": "mistral4"},
        vision_config={**VISION, "model_type": "pixtral", "head_dim": 16},
        image_token_index=511,
    )


def with_text(config_class, family, model_type=None, vision=None, token=None, **changed):
    """A whole model around the text model of a tiny family; `token`: its `image_token_id`."""

    def make():
        text = {**TEXT, **TINY_FAMILIES.get(family, ("", {}))[1], **changed}
        text["model_type"] = model_type or family
        return getattr(transformers, config_class)(
            text_config=text,
            vision_config=VISION if vision is None else vision,
            **({} if token is None else {"image_token_id": token}),
        )

    return make


def with_sound(config_class, family, **changed):
    """A whole model of sounds and text around the text model of a tiny family."""

    def make():
        text = {**TEXT, **TINY_FAMILIES[family][1], "model_type": family, **changed}
        small = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 1}
        parts = {
            "VoxtralConfig": {"audio_config": {**small, "intermediate_size": 64}},
            "Qwen2AudioConfig": {
                "audio_config": {
                    **{"model_type": "qwen2_audio_encoder", "encoder_layers": 1, "d_model": 16},
                    **{"encoder_attention_heads": 1, "encoder_ffn_dim": 16},
                }
            },
            "GraniteSpeechConfig": {
                "encoder_config": {
                    **{"input_dim": 16, "num_layers": 1, "hidden_dim": 16, "num_heads": 1},
                    **{"dim_head": 16, "output_dim": 8},
                },
                "projector_config": {
                    **{"model_type": "blip_2_qformer", **small, "encoder_hidden_size": 16},
                    "intermediate_size": 16,
                },
                **{"has_lora_adapter": False, "tie_word_embeddings": False},
            },
        }
        return getattr(transformers, config_class)(text_config=text, **parts[config_class])

    return make


GLM_VISION = {
    **{"hidden_size": 16, "depth": 1, "num_heads": 1, "image_size": 28, "patch_size": 14},
    **{"out_hidden_size": 64, "intermediate_size": 16, "spatial_merge_size": 2},
}
SIGLIP = {**VISION, "model_type": "siglip_vision_model"}
AXES = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
GLM_MOE = {key: value for key, value in TINY_FAMILIES["glm4_moe"][1].items() if "qk" not in key}
# their towers are not used; the text models are those of tiny families
TEXT_ALONE = {
    "kimi k2.5": with_text(
        "Kimi_K25Config",
        "deepseek_v3",
        vision={**VISION, "pos_emb_height": 2, "pos_emb_width": 2},
        tie_word_embeddings=True,
    ),
    "lfm2-vl": with_text(
        "Lfm2VlConfig",
        "lfm2",
        vision={**VISION, "model_type": "siglip2_vision_model", "num_patches": 4},
    ),
    "glm-4.1v": with_text(
        "Glm4vConfig",
        "",
        "glm4v_text",
        GLM_VISION,
        rope_parameters={**AXES, "mrope_section": [2, 1, 1]},
    ),
    "glm-4.6v flash": with_text(
        "Glm46VConfig",
        "",
        "glm4v_text",
        GLM_VISION,
        rope_parameters={**AXES, "mrope_section": [2, 1, 1]},
    ),
    "glm-4.5v": with_text(
        "Glm4vMoeConfig",
        "",
        "glm4v_moe_text",
        GLM_VISION,
        **GLM_MOE,
        rope_parameters={**AXES, "mrope_section": [4, 2, 2]},
    ),
    "internvl": with_text(
        "InternVLConfig",
        "qwen3",
        vision={**VISION, "image_size": [32, 32], "patch_size": [16, 16]},
    ),
    "minicpm-v 4.6": with_text(
        "MiniCPMV4_6Config", "qwen3_5", "qwen3_5_text", {**VISION, "insert_layer_id": 0}, 511
    ),
    "minicpm-v 4.7": with_text(
        "MiniCPMV4_7Config", "qwen3_5", "qwen3_5_text", {**VISION, "insert_layer_id": 0}, 511
    ),
    "llava-next": with_text(
        "LlavaNextConfig", "mistral", vision={**VISION, "model_type": "clip_vision_model"}
    ),
    **{
        name: with_text(
            f"{name}Config", "llama", vision={**VISION, "model_type": "clip_vision_model"}
        )
        for name in ("LlavaNextVideo", "VideoLlava", "VipLlava")
    },
    "muse glimmer": with_text(
        "MuseGlimmerConfig",
        "muse_glimmer",
        "muse_glimmer_text",
        {**VISION, "pos_emb_height": 2, "pos_emb_width": 2},
    ),
    "cosmos 3 edge": with_text(
        "Cosmos3EdgeConfig",
        "arcee",
        "cosmos3_edge_text",
        {**VISION, "num_patches": 4},
        head_dim=16,
        hidden_act="relu2",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    ),
    "paligemma 2": with_text("PaliGemmaConfig", "gemma2", vision=SIGLIP),
    "idefics 2": with_text("Idefics2Config", "mistral"),
    "llava-onevision": with_text("LlavaOnevisionConfig", "qwen2", vision=SIGLIP),
    "exaone 4.5": with_text(
        "Exaone4_5_Config", "exaone4", vision={**GLM_VISION, "num_key_value_heads": 1}
    ),
    "step-3.7": with_text("Step3p7Config", "step", "step3p5", {**VISION, "image_size": 28}),
    "ovis2": with_text("Ovis2Config", "qwen2"),
    "videollama 3": with_text("VideoLlama3Config", "qwen2", vision={**VISION, "patch_size": 16}),
    "got-ocr 2": with_text(
        "GotOcr2Config", "qwen2", vision={**VISION, "output_channels": 16, "mlp_dim": 16}
    ),
    "deepseek-vl 7b": with_text("DeepseekVLHybridConfig", "llama", vision=SIGLIP),
    "granite docling": with_text(
        "GraniteDoclingConfig",
        "granite",
        "granite_docling_text",
        {**VISION, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
        pad_token_id=0,
    ),
    "voxtral": with_sound("VoxtralConfig", "llama"),
    "qwen2-audio": with_sound("Qwen2AudioConfig", "qwen2"),
    # transformers 5.23 does not divide its logits
    "granite speech": with_sound("GraniteSpeechConfig", "granite", logits_scaling=1.0),
    "qwen2-vl": with_text(
        "Qwen2VLConfig",
        "",
        "qwen2_vl_text",
        {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 1, "mlp_ratio": 1},
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    ),
    "mistral medium 3.5": with_text(
        "Mistral3Config", "ministral3", vision={**VISION, "model_type": "pixtral", "head_dim": 16}
    ),
}


def gemma4_unified():
    text = {**TEXT, **TINY_FAMILIES["gemma4"][1], "model_type": "gemma4_unified_text"}
    text.pop("hidden_size_per_layer_input")
    return transformers.Gemma4UnifiedConfig(
        text_config=text, vision_config=None, audio_config=None, tie_word_embeddings=True
    )


def granite4_vision():
    text = {**TEXT, **TINY_FAMILIES["granite"][1], "model_type": "granite4_vision_text"}
    return transformers.Granite4VisionConfig(
        text_config=text,
        vision_config={**SIGLIP, "hidden_size": 64},
        deepstack_layer_map=[[0, 1]],
        spatial_target_layers=[0, 1, 2, 2],
        downsample_rate="1/2",
    )


WHOLE = {
    **TEXT_ALONE,
    "granite 4 vision": granite4_vision,
    "gemma 4 12B": gemma4_unified,
    "gemma 4": gemma4,
    "gemma 4 E2B": gemma4_shared,
    "gemma 3": gemma,
    "mistral 3": mistral,
    "mistral 4": mistral4,
    "llama 4": llama4,
}
