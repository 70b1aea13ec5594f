"""Images with models in Mistral's own files: tokens are those of transformers' class."""

import json

import pytest
import torch
import transformers

from formats.checkpoint import CheckpointReader
from formats.files.model_path import model_folder
from tests.mistral_files import own_cache, write_mistral, write_tekken
from tests.qserve.multimodal.conftest import Vision
from tests.tiny_vision import picture
from tests.tiny_vision.model import TEXT
from tests.tiny_vision.parts import TOWER

__all__ = ["own_cache"]

VOCABULARY = 384
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.0,
    "llama_4_scaling_beta": 0.3,
}
LATENT = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "rope_parameters": YARN,
}
TEXTS = {
    "mistral": {"sliding_window": None},
    "ministral3": {"rope_parameters": YARN},
    "mistral4": LATENT,  # as Mistral Large 3
}


def write_model(folder, text_type):
    """A tiny model of transformers' class; returns it. "pixtral": without a merger of patches."""
    is_pixtral = text_type == "pixtral"
    text_type = "mistral" if is_pixtral else text_type
    usual = {key: value for key, value in TEXT.items() if key != "head_dim"}
    text = {**usual, "vocab_size": VOCABULARY, "model_type": text_type, **TEXTS[text_type]}
    own = {"spatial_merge_size": 2}
    if is_pixtral:
        own = {"vision_feature_select_strategy": "full", "vision_feature_layer": -1}
    make = transformers.LlavaConfig if is_pixtral else transformers.Mistral3Config
    config = make(
        text_config=text,
        vision_config={
            **TOWER,
            **{"model_type": "pixtral", "image_size": 64, "patch_size": 8, "hidden_act": "silu"},
        },
        image_token_id=10,
        multimodal_projector_bias=is_pixtral,
        **own,
        tie_word_embeddings=False,
    )
    torch.manual_seed(7)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, float("norm" in name), 0.2)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=[*TEXTS, "pixtral"])
def model(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    judge = write_model(root / "transformers", request.param)
    folder = write_mistral(root / "transformers", root / "mistral3", num_files=2)
    write_tekken(folder, VOCABULARY)
    return Vision(model_folder(folder), judge)


def test_tokens_equal_transformers(model):
    mark = model.mark
    requests = [
        ("what is a page table", ()),
        (f"look: {mark} what is it", (picture(40, 30, 1),)),
        (f"{mark} beside {mark} differs", (picture(64, 64, 2), picture(70, 9, 3))),
    ]
    found, _ = model.run(model.engine(max_num_batched_tokens=7), *requests)
    assert found == [model.expected(*request) for request in requests]
    assert len(set(map(tuple, found))) == len(found), "the tiny model does not see the images"


def test_names_are_those_of_the_class(model):
    reader = CheckpointReader(model.folder)
    state = model.model.state_dict()
    parts = {name: entry.read() for name, entry in reader.other_parts.items()}
    assert {name for name in state if "vision_tower" in name or "projector" in name} == set(parts)
    assert all(torch.equal(tensor, state[name]) for name, tensor in parts.items())
    assert json.loads((model.folder / "config.json").read_text())["image_token_index"] == 10
