"""PaddleOCR-VL as published: a flat config.json, other names, tensors that no code uses."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate.pipeline import quantize_checkpoint
from formats.checkpoint import CheckpointReader
from formats.scheme import Scheme
from tests.qserve.multimodal.conftest import Vision
from tests.tiny_vision import picture

# names in files, which transformers writes, too -> names of its modules
MODULES = {"model.": "model.language_model.", "visual.": "model.visual.", "mlp_AR.": "projector."}
UNUSED = ("visual.vision_model.packing_position_embedding.weight", "visual.vision_model.head.probe")


@pytest.fixture(scope="module")
def published(vision, tmp_path_factory):
    folder = tmp_path_factory.mktemp("published") / "paddleocr_vl"
    shutil.copytree(vision("paddleocr_vl").folder, folder)
    state = load_file(folder / "model.safetensors")
    assert {name.split(".")[0] for name in state} == {"model", "visual", "mlp_AR"}
    state |= {name: torch.ones(3, 32) for name in UNUSED}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    config |= {key: value for key, value in text.items() if key != "model_type"}
    config |= {"model_type": "paddleocr_vl", "rope_theta": rope.pop("rope_theta")}
    config["rope_scaling"] = {**rope, "type": "default"}
    config["vision_config"]["model_type"] = "paddleocr_vl"
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_tokens_are_those_of_transformers(vision, published):
    source = vision("paddleocr_vl")
    model = Vision(published, source.model)
    request = f"{source.mark} what", (picture(40, 30),)
    assert model.run(model.engine(), request)[0] == [source.expected(*request)]


def test_names_of_modules_are_read(vision, tmp_path):
    source = vision("paddleocr_vl")
    folder = shutil.copytree(source.folder, tmp_path / "paddleocr_vl")
    state = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        first, _, rest = name.partition(".")
        state[f"{MODULES[f'{first}.']}{rest}"] = tensor
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    request = f"{source.mark} what", (picture(40, 30),)
    model = Vision(folder, source.model)
    assert model.run(model.engine(), request)[0] == [source.expected(*request)]


def test_tensors_that_are_not_used_are_kept(published, tmp_path):
    folder = tmp_path / "paddleocr_vl"
    scheme = Scheme.parse("w4a16-sym-g32")
    quantize_checkpoint(published, folder, scheme=scheme, recipe="rtn", progress=False)
    found = CheckpointReader(folder)
    assert found.other_parts.keys() == CheckpointReader(published).other_parts.keys()
    assert set(UNUSED) < found.other_parts.keys()
    ignored = found.whole_config["quantization_config"]["ignore"]
    assert {"re:.*visual.*", "re:.*mlp_AR.*", "re:.*projector.*"} <= set(ignored)
