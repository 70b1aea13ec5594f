"""Kimi-VL, and Kimi-K2.5 with the keys of Moonshot's own config.json, whose towers are one.

transformers has no class for Kimi-VL: its Kimi-K2.5 computes the same for an image.
"""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from formats.errors import CheckpointError
from qserve import LLM
from qserve.multimodal.calibration import CalibrationChats
from qserve.multimodal.image_processors.own_processor import OwnImageProcessor
from qserve.multimodal.stored_forms.kimi_config import as_kimi_k25
from tests.qserve.multimodal.conftest import Vision
from tests.tiny_vision import picture, rename_tensors

KIMI_VL_KEYS = {"pos_emb_height": "init_pos_emb_height", "pos_emb_width": "init_pos_emb_width"}
KIMI_K25_KEYS = {
    **KIMI_VL_KEYS,
    "hidden_size": "vt_hidden_size",
    "intermediate_size": "vt_intermediate_size",
    "num_attention_heads": "vt_num_attention_heads",
    "num_hidden_layers": "vt_num_hidden_layers",
}


def rewritten(source, folder, keys, **others):
    """Copy a tiny Kimi-K2.5 with the keys of Moonshot's files."""
    shutil.copytree(source, folder)
    stated = json.loads((folder / "config.json").read_text())
    vision = {keys.get(key, key): value for key, value in stated["vision_config"].items()}
    vision.pop("rope_parameters")
    stated["media_placeholder_token_id"] = stated.pop("image_token_id")
    stated.pop("projection_hidden_size")
    (folder / "config.json").write_text(json.dumps({**stated, "vision_config": vision, **others}))
    return folder


def requests_of(model):
    mark = model.mark
    return [("what is a page", ()), (f"{mark} and {mark} what", (picture(40, 30), picture(9, 70)))]


@pytest.fixture
def kimi_vl(vision, tmp_path):
    source = vision("kimi_k25")
    names = {"architectures": ["KimiVLForConditionalGeneration"], "model_type": "kimi_vl"}
    folder = rewritten(source.folder, tmp_path / "kimi_k25", KIMI_VL_KEYS, **names)
    linears = {"proj.0.": "linear_1.", "proj.2.": "linear_2."}
    rename_tensors(folder, {"mm_projector": "multi_modal_projector", **linears})
    options = {"patch_size": 8, "in_token_limit": 24, "merge_kernel_size": [2, 2]}
    (folder / "preprocessor_config.json").write_text(json.dumps({**options, "pad_input": True}))
    return Vision(folder, source.model)


def test_tokens_of_kimi_vl(kimi_vl):
    model, requests = kimi_vl, requests_of(kimi_vl)
    found, _ = model.run(model.engine(max_num_batched_tokens=7), *requests)
    assert found == [model.expected(*request) for request in requests]


def test_calibration_sees_the_images_of_kimi_vl(kimi_vl):
    """transformers loads the tower of Kimi-K2.5 itself."""
    model, image = kimi_vl, picture(40, 30)
    encode = CalibrationChats(model.folder).tower("cpu", torch.float32)
    inputs = model.inputs([model.processor.config.image_token_id], [image])
    with torch.no_grad():
        wanted = model.model.model.get_image_features(
            inputs["pixel_values"], inputs["image_grid_thw"]
        ).pooler_output
    torch.testing.assert_close(encode([image, image]), torch.cat([*wanted, *wanted]))


def test_tokens_of_kimi_k25_in_moonshots_form(vision, tmp_path):
    source = vision("kimi_k25")
    names = {"architectures": ["KimiK25ForConditionalGeneration"]}
    folder = rewritten(source.folder, tmp_path / "kimi_k25", KIMI_K25_KEYS, **names)
    model, requests = Vision(folder, source.model), requests_of(source)
    assert CalibrationChats(source.folder).tower("cpu", torch.float32) is None
    found, _ = model.run(model.engine(), *requests)
    assert found == [source.expected(*request) for request in requests]


def test_fused_tensors_of_another_size_are_named(vision, tmp_path):
    folder = tmp_path / "kimi_k25"
    shutil.copytree(vision("kimi_k25").folder, folder)
    path = next(folder.glob("*.safetensors"))
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("blocks.0.wqkv.bias"))
    for wrong in (tensors[name][:-1].clone(), tensors[name][:1].clone(), torch.tensor(1.0)):
        save_file({**tensors, name: wrong}, path, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=r"wqkv\.bias: expected queries, keys and values"):
            LLM(folder, device="cpu", max_model_len=64)


def test_keys_of_published_files():
    stated = {
        "model_type": "kimi_k25",
        "media_placeholder_token_id": 163605,
        "vision_config": {
            **{"vt_hidden_size": 1152, "vt_num_attention_heads": 16, "init_pos_emb_time": 4},
            **{"model_type": "", "projector_ln_eps": 1e-5, "merge_kernel_size": [2, 2]},
        },
        "text_config": {"model_type": "kimi_k2", "quantization_config": {"quant_method": "x"}},
    }
    found = as_kimi_k25(stated)
    assert found["image_token_id"] == 163605
    assert found["projection_hidden_size"] == 1152 and found["projection_layer_norm_eps"] == 1e-5
    assert found["vision_config"] == {
        **{"hidden_size": 1152, "num_attention_heads": 16, "pos_emb_time": 4},
        **{"model_type": "kimi_k25_vision", "projector_ln_eps": 1e-5, "merge_kernel_size": [2, 2]},
    }
    assert found["text_config"] == {"model_type": "kimi_k2"}
    assert "quantization_config" in stated["text_config"], "the argument is unchanged"


@pytest.mark.parametrize(
    ("size", "scaled", "filled"),
    [
        ((16, 16), (16, 16), (16, 16)),
        ((17, 30), (17, 30), (32, 32)),
        ((100, 50), (57, 28), (64, 32)),  # 72 patches: by the square root of 24 / 72
        ((3, 300), (3, 300), (16, 304)),  # no patch
    ],
)
def test_images_of_kimi_vl_are_scaled_by_pillow(tmp_path, size, scaled, filled):
    """The sizes are those of Moonshot's own code, computed by hand."""
    options = {"patch_size": 8, "in_token_limit": 24, "merge_kernel_size": [2, 2]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(options))
    image = picture(*size)
    (found,) = OwnImageProcessor(tmp_path, "kimi_vl").cut(image).tiles_CHW
    assert found.shape == (3, filled[1], filled[0])
    wanted = np.zeros((filled[1], filled[0], 3), np.uint8)
    wanted[: scaled[1], : scaled[0]] = np.asarray(image.resize(scaled, Image.Resampling.BICUBIC))
    assert np.array_equal(found.transpose(1, 2, 0), wanted)


def test_images_that_are_not_filled_up_are_refused(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"pad_input": False}))
    with pytest.raises(CheckpointError, match="pad_input of the image processor: expected true"):
        OwnImageProcessor(tmp_path, "kimi_vl")
