"""DeepSeek-OCR and DeepSeek-OCR-2: their image processor, their files, and what is refused."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate.pipeline import quantize_checkpoint
from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.scheme import Scheme
from qserve.multimodal.families import VisionConfig
from qserve.multimodal.image_processors.own_processor import OwnImageProcessor
from qserve.text.tokenizer import Tokenizer
from tests.qserve.model.variants import edited, logits
from tests.qserve.multimodal.conftest import Vision
from tests.tiny_vision import picture

SIZES = [(1, 1), (3, 1), (1, 50), (40, 30), (30, 40), (64, 64), (65, 33), (300, 40), (17, 200)]
OPTIONS = {"size": {"height": 64, "width": 64}, "tile_size": 32, "max_patches": 6}
PATCHES = "model.vision_model.embeddings.patch_embedding.weight"  # which no code uses


@pytest.mark.parametrize("size", SIZES)
def test_views_are_those_of_transformers(tmp_path, size):
    """Where a border is not divided evenly, transformers moves the whole image by one pixel."""
    from transformers import DeepseekOcr2ImageProcessorPil

    (tmp_path / "preprocessor_config.json").write_text(json.dumps(OPTIONS))
    image = picture(*size, 3)
    found = OwnImageProcessor(tmp_path, "deepseek_ocr_2")([image])
    wanted = DeepseekOcr2ImageProcessorPil(**OPTIONS)(image)
    assert list(wanted["num_local_patches"]) == found["num_local_patches"]
    assert ("pixel_values_local" in wanted) == ("pixel_values_local" in found)
    if "pixel_values_local" in found:
        assert np.allclose(found["pixel_values_local"], wanted["pixel_values_local"], atol=1e-6)
    (whole_CHW,), (want_CHW,) = found["pixel_values"], wanted["pixel_values"]
    moved = [np.roll(want_CHW, by, axis) for by in (-1, 0, 1) for axis in (1, 2)]
    assert min(np.abs(whole_CHW - each).mean() for each in moved) < 0.01


def test_options_have_defaults_and_are_checked(tmp_path):
    """Published folders have no options of an image processor that the server reads."""
    first, second = (OwnImageProcessor(tmp_path, f"deepseek_ocr{end}") for end in ("", "_2"))
    assert [len(each.cut(picture(2000, 1400)).tiles_CHW) for each in (first, second)] == [7, 7]
    assert first.cut(picture(640, 640)).tiles_CHW[0].shape == (3, 1024, 1024)
    assert second.cut(picture(769, 100)).tiles_CHW[0].shape == (3, 768, 768)
    for stated, words in (
        ({"min_patches": 9, "max_patches": 4}, "min_patches .*at most max_patches 4, found 9"),
        ({"crop_to_patches": False}, "crop_to_patches .*expected true"),
        ({"tile_size": 0}, "tile_size .*expected a positive whole number"),
    ):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(stated))
        with pytest.raises(InputError, match=words):
            OwnImageProcessor(tmp_path, "deepseek_ocr")


def test_sizes_of_the_published_towers():
    """Numbers of the published config.json, which states only some of the sizes."""
    sam = {"downsample_channels": [512, 1024], "global_attn_indexes": [2, 5, 8, 11]}
    sam |= {"heads": 12, "layers": 12, "width": 768}
    clip = {"heads": 16, "image_size": 224, "layers": 24, "patch_size": 14, "width": 1024}
    text = {"hidden_size": 1280, "intermediate_size": 6848, "num_hidden_layers": 12}
    text |= {"num_attention_heads": 10, "num_key_value_heads": 10, "vocab_size": 129280}
    text |= {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6}
    text |= {"moe_intermediate_size": 896, "first_k_dense_replace": 1, "topk_method": "greedy"}
    text |= {"q_lora_rank": None, "kv_lora_rank": None, "v_head_dim": 0, "qk_rope_head_dim": 0}
    text |= {"use_mla": False, "rm_head": False, "lm_head": True, "torch_dtype": "bfloat16"}
    whole = {
        "architectures": ["DeepseekOCRForCausalLM"],
        "model_type": "deepseek_vl_v2",
        "language_config": text,
        "vision_config": {"image_size": 1024, "width": {"clip-l-14-224": clip, "sam_vit_b": sam}},
    }
    vision = VisionConfig.of(whole).values["vision_config"]
    assert vision["sam_config"]["mlp_dim"] == 3072
    assert vision["sam_config"]["patch_size"] == 16
    assert vision["encoder_config"]["intermediate_size"] == 4096
    assert VisionConfig.of(whole).axis_pairs == ()
    second = {**sam, "downsample_channels": [512, 896]}
    whole["vision_config"]["width"] = {"qwen2-0-5b": {"dim": 896}, "sam_vit_b": second}
    assert VisionConfig.of(whole) is None, "the tower of DeepSeek-OCR-2"
    whole["architectures"] = ["DeepseekOCR2ForCausalLM"]
    vision = VisionConfig.of(whole).values["vision_config"]
    assert vision["encoder_config"]["num_hidden_layers"] == 24
    assert vision["encoder_config"]["intermediate_size"] == 4864


@pytest.mark.parametrize("family", ["deepseek_ocr", "deepseek_ocr_2"])
def test_chats_have_images_without_a_template(vision, family):
    folder = vision(family).folder
    parts = [{"type": "image"}, {"type": "text", "text": "Free OCR."}]
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template")
    plain = folder.parent / f"{family}-plain"
    shutil.copytree(folder, plain, dirs_exist_ok=True)
    (plain / "tokenizer_config.json").write_text(json.dumps(config))
    text = Tokenizer(plain).render_chat([{"role": "user", "content": parts}])
    assert text.endswith("<image>\nFree OCR.")


def test_transformers_names_are_read(vision, tmp_path):
    """DeepSeek-OCR-2 as transformers writes it: its config.json, below names of its modules."""
    source = vision("deepseek_ocr_2")
    folder = shutil.copytree(source.folder, tmp_path / "deepseek_ocr_2")
    shutil.copy(folder / "transformers_config.json", folder / "config.json")
    model, request = Vision(folder, source.model), (f"{source.mark} what", (picture(40, 30),))
    assert model.run(model.engine(), request)[0] == [source.expected(*request)]


def test_tensors_that_are_not_used_are_kept(vision, tmp_path):
    source = vision("deepseek_ocr")
    folder = shutil.copytree(source.folder, tmp_path / "deepseek_ocr")
    state = load_file(folder / "model.safetensors") | {PATCHES: torch.ones(32, 3, 8, 8)}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    model, request = Vision(folder, source.model), (f"{source.mark} what", (picture(40, 30),))
    assert model.run(model.engine(), request)[0] == [source.expected(*request)]
    target, scheme = tmp_path / "quantized", Scheme.parse("w4a16-sym-g32")
    quantize_checkpoint(folder, target, scheme=scheme, recipe="rtn", progress=False)
    found = CheckpointReader(target)
    assert PATCHES in found.other_parts and "model.view_seperator" in found.other_parts
    assert found.whole_config["model_type"] == "deepseek_vl_v2"
    ignored = found.whole_config["quantization_config"]["ignore"]
    assert {"re:.*sam_model.*", "re:.*vision_model.*", "re:.*projector.*"} <= set(ignored)


def test_latent_attention_is_refused(vision, tmp_path):
    """DeepSeek-VL2's larger models have it, under the same model_type."""

    def latent(config):
        config["language_config"].pop("use_mla")

    folder = edited(vision("deepseek_ocr").folder, tmp_path / "x", config=latent)
    with pytest.raises(InputError, match="DeepseekOCRForCausalLM"):
        logits(folder)
