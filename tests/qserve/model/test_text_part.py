"""Checkpoints that also see pictures: the text model in them is quantized, inspected and served."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from calibrate.pipeline import quantize_checkpoint
from formats.architecture.text_part import stored_block, text_config
from formats.errors import InputError
from formats.inspection.inspect import inspect_checkpoint
from formats.scheme import Scheme
from tests.formats.inspection.findings import of_weights
from tests.own_code.models import TINY_MODELS
from tests.qserve.model.variants import TOKENS, edited, logits, relative
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


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Name -> (folder, transformers' logits of the whole model on a text)."""
    found = {}

    def make(name):
        if name not in found:
            torch.manual_seed(3)
            model = transformers.AutoModelForMultimodalLM.from_config(
                WHOLE[name](), dtype=torch.float32
            ).eval()
            for parameter_name, parameter in model.named_parameters():
                if "norm" in parameter_name:
                    is_one = float(name != "gemma 3")
                    torch.nn.init.normal_(parameter, is_one, 0.2)
            folder = tmp_path_factory.mktemp("whole") / "model"
            model.save_pretrained(folder)
            if name == "kimi k2.5":  # transformers 5.23 saves its tower's names for layers
                state = load_file(folder / "model.safetensors")
                state = {key.replace("model.blocks.", "model.layers."): state[key] for key in state}
                save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
            with torch.no_grad():
                found[name] = folder, model(torch.tensor([TOKENS])).logits[0]
        return found[name]

    return make


# transformers takes 20 seconds for the tower of Kimi; the others are as LLaVA-NeXT is
LATER = ("kimi k2.5", *(name for name in TEXT_ALONE if "Llava" in name), "idefics 2")


def _marked(name):
    return pytest.param(name, marks=pytest.mark.exhaustive) if name in LATER else name


@pytest.mark.parametrize("name", [_marked(name) for name in WHOLE])
def test_text_model_is_served(made, name):
    folder, want = made(name)
    assert relative(logits(folder), want) < 1e-5


@pytest.mark.parametrize(
    ("architecture", "family", "part"),
    [
        ("InternVLChatModel", "qwen3", "mlp1.0.weight"),
        ("InternVLChatModel", "internlm2", "mlp1.0.weight"),
        ("KimiK25ForConditionalGeneration", "deepseek_v3", "mm_projector.proj.0.weight"),
        ("KimiVLForConditionalGeneration", "deepseek_v3", "vision_tower.x.weight"),
        ("NemotronH_Nano_Omni_Reasoning_V3", "nemotron_h", "sound_encoder.x.weight"),
        ("NemotronH_Nano_VL_V2", "nemotron_h", "vision_model.x.weight"),
    ],
)
def test_models_with_remote_code(tiny_model, own_code, tmp_path, architecture, family, part):
    """As published: the text model below `language_model.`, its config as llm_config."""
    make = own_code if family in TINY_MODELS else tiny_model
    source, whole = make(family), tmp_path / "whole"
    whole.mkdir()
    state = {f"language_model.{k}": v for k, v in load_file(source / "model.safetensors").items()}
    state[part] = torch.ones(2, 2)
    save_file(state, whole / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((source / "config.json").read_text())
    key = "text_config" if "Kimi" in architecture else "llm_config"
    if "Kimi" in architecture:
        text["model_type"] = "kimi_k2"
    config = {"architectures": [architecture], "model_type": "x", key: text}
    (whole / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(whole), logits(source))
    if architecture not in ("InternVLChatModel", "NemotronH_Nano_VL_V2"):
        return  # the same writer
    for folder in (whole, source):
        target = tmp_path / f"quantized {folder.name}"
        quantize_checkpoint(
            folder,
            target,
            scheme=Scheme.parse("w4a16-sym-g32"),
            output_format="compressed-tensors",
            progress=False,
        )
    found, want = (
        load_file(tmp_path / f"quantized {folder.name}" / "model.safetensors")
        for folder in (whole, source)
    )
    assert torch.equal(found.pop(part), state[part])
    assert found.keys() == {f"language_model.{name}" for name in want} != state.keys()
    assert torch.equal(logits(tmp_path / "quantized whole"), logits(target))


def test_gemma_3n_as_published(tiny_model, tmp_path):
    """Its towers need another library; their tensors are not read."""
    source, whole = tiny_model("gemma3n"), tmp_path / "whole"
    whole.mkdir()
    state = {
        f"model.language_model.{name.removeprefix('model.')}": tensor
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    for part in ("vision_tower", "audio_tower", "embed_vision", "embed_audio"):
        state[f"model.{part}.x.weight"] = torch.ones(2, 2)
    save_file(state, whole / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((source / "config.json").read_text())
    config = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
        "text_config": text,
    }
    (whole / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(whole), logits(source))


def test_text_model_of_gemma_4_12b_alone(tmp_path):
    """Gemma4UnifiedForCausalLM, also if config.json leaves out the window and the heads."""
    text = {**TEXT, **TINY_FAMILIES["gemma4"][1], "num_hidden_layers": 6}
    for key in ("hidden_size_per_layer_input", "layer_types", "sliding_window"):
        text.pop(key, None)
    torch.manual_seed(3)
    config = transformers.Gemma4UnifiedTextConfig(**text)
    model = transformers.Gemma4UnifiedForCausalLM(config).float().eval()
    model.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(tmp_path / "model"), want) < 1e-5

    def leave_out(values):
        assert values.pop("sliding_window") == 1024
        assert values["architectures"] == ["Gemma4UnifiedForCausalLM"]

    folder = edited(tmp_path / "model", tmp_path / "x", config=leave_out)
    assert relative(logits(folder), want) < 1e-5
    target = tmp_path / "quantized"
    quantize_checkpoint(folder, target, scheme=Scheme.parse("w8a16-sym-g32"), progress=False)
    assert 0 < relative(logits(target), want) < 0.1
    stated = json.loads((target / "config.json").read_text())
    assert stated["model_type"] == "gemma4_unified_text"


@pytest.mark.parametrize("name", ["gemma 3", "mistral 3"])
def test_names_of_the_modules_in_transformers(made, tmp_path, name):
    """model.language_model.layers, where published files have language_model.model.layers."""
    folder, want = made(name)

    def rename(state):
        for old in list(state):
            assert not old.startswith("model.")
            new = old.removeprefix("language_model.model.")
            new = f"model.{new}" if new == old else f"model.language_model.{new}"
            state[new] = state.pop(old)

    assert relative(logits(edited(folder, tmp_path / "x", rename)), want) < 1e-5


def test_head_of_its_own_is_read_whatever_the_config_says(made, tmp_path):
    """The whole states a tie, which transformers' default is, and its text model none."""
    folder, want = made("mistral 3")

    def add(state):
        embedding = state["language_model.model.embed_tokens.weight"]
        state["language_model.lm_head.weight"] = 2 * embedding

    assert relative(logits(edited(folder, tmp_path / "x", add)), 2 * want) < 1e-5


def test_omitted_config_values_are_filled_in(made, tmp_path):
    """As gemma-3-4b: the number of heads is transformers' default."""
    folder, _ = made("gemma 3")

    def leave_out(config):
        del config["text_config"]["num_attention_heads"]

    with pytest.raises(
        InputError, match=r"expected \[128, 64\] from config.json, found \[64, 64\]"
    ):
        logits(edited(folder, tmp_path / "x", config=leave_out))


def test_defaults_of_text_models_are_those_of_transformers():
    """Published files of LLaVA-1.5 and Idefics2 leave out even the sizes."""
    for kind, architecture in (
        ("llama", "LlavaForConditionalGeneration"),
        ("mistral", "Idefics2ForConditionalGeneration"),
        ("qwen2", "Qwen2AudioForConditionalGeneration"),
        ("granite", "GraniteSpeechForConditionalGeneration"),
        ("granite4_vision_text", "Granite4VisionForConditionalGeneration"),
        ("granite_docling_text", "GraniteDoclingForConditionalGeneration"),
    ):
        stated = {"architectures": [architecture], "text_config": {"model_type": kind}}
        found, wanted = text_config(stated, []), transformers.AutoConfig.for_model(kind)
        sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        assert all(found[key] == getattr(wanted, key) for key in sizes)
        kv_heads = found.get("num_key_value_heads", found["num_attention_heads"])
        assert kv_heads == wanted.num_key_value_heads


def test_result_of_quantizing_keeps_the_vision_part(made, tmp_path):
    folder, want = made("gemma 3")
    target = tmp_path / "quantized"
    quantize_checkpoint(folder, target, scheme=Scheme.parse("w8a16-sym-g32"), progress=False)
    config = json.loads((target / "config.json").read_text())
    assert config["architectures"] == ["Gemma3ForConditionalGeneration"]
    assert "vision_config" in config
    before, after = (load_file(path / "model.safetensors") for path in (folder, target))
    vision = {name for name in before if not name.startswith("language_model.")}
    assert any(name.startswith("vision_tower.") for name in vision)
    assert all(torch.equal(before[name], after[name]) for name in vision)
    assert "language_model.model.layers.0.self_attn.q_proj.weight_packed" in after
    assert 0 < relative(logits(target), want) < 0.1
    for checkpoint in (folder, target):
        assert of_weights(inspect_checkpoint(checkpoint)) == ()


@pytest.mark.exhaustive
def test_experts_in_one_tensor_are_quantized_each(made, tmp_path):
    """Names as llm-compressor writes them for Llama 4."""
    folder, want = made("llama 4")
    target = tmp_path / "quantized"
    scheme = Scheme.parse("w8a16-sym-g32")
    quantize_checkpoint(folder, target, scheme=scheme, recipe="rtn", progress=False)
    after = load_file(target / "model.safetensors")
    stem = "language_model.model.layers.1.feed_forward"
    assert f"{stem}.experts.5.gate_proj.weight_packed" in after
    assert f"{stem}.shared_expert.down_proj.weight_packed" in after
    assert 0 < relative(logits(target), want) < 0.1
    for checkpoint in (folder, target):
        assert of_weights(inspect_checkpoint(checkpoint)) == ()


def test_unknown_part_is_not_treated_as_vision(made, tmp_path):
    folder, _ = made("gemma 3")
    changed = edited(
        folder, tmp_path / "x", lambda s: s.update({"model.actions.weight": torch.ones(2)})
    )
    with pytest.raises(InputError, match="that no layer of the model uses.*model.actions.weight"):
        logits(changed)


def test_damage_of_a_stored_name_is_found(made, tmp_path):
    """`inspect` uses the tensor's name in the file."""
    folder, _ = made("mistral 3")
    target = tmp_path / "x"
    target.mkdir()
    state = load_file(folder / "model.safetensors")
    state["language_model.model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text((folder / "config.json").read_text())
    (problem, *_) = of_weights(inspect_checkpoint(target))
    assert problem.subject == "language_model.model.layers.1.mlp.up_proj.weight"


def test_head_inside_of_the_text_model_is_ignored_by_both_names():
    """transformers names Llama 4's head as the file does, and LLaVA's without the prefix."""
    block = {"ignore": ["lm_head"], "config_groups": {}}
    found = stored_block(block, "language_model.model.", ["vision_model"])
    assert found["ignore"] == ["lm_head", "re:.*lm_head", "re:.*vision_model.*"]
    assert stored_block(block, "model.language_model.", [])["ignore"] == ["lm_head"]
