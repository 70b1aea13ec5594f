"""HyperCLOVA X SEED as published: other names of the architecture and of tensors."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate.pipeline import quantize_checkpoint
from formats.checkpoint import CheckpointReader
from formats.scheme import Scheme
from tests.qserve.model.variants import logits
from tests.qserve.multimodal.conftest import Vision
from tests.tiny_vision import picture

NAMES = {
    "model.language_model.": "model.language_model.model.",
    "lm_head.": "model.language_model.lm_head.",
    "model.projector.": "model.vision_projector.",
}


def published_name(name):
    own = name.replace("model.language_model.model.", "model.language_model.")
    own = own.replace("model.language_model.lm_head.", "lm_head.")
    own = own.replace("model.vision_projector.", "model.projector.")
    stored = next((each for each in NAMES if own.startswith(each)), None)
    return own if stored is None else NAMES[stored] + own.removeprefix(stored)


@pytest.fixture(scope="module")
def published(vision, tmp_path_factory):
    folder = tmp_path_factory.mktemp("published") / "hyperclova"
    shutil.copytree(vision("hyperclova").folder, folder)
    stored = load_file(folder / "model.safetensors")
    state = {published_name(name): tensor for name, tensor in stored.items()}
    assert len(state) == len(stored) and set(NAMES.values()) <= {
        prefix for prefix in NAMES.values() for name in state if name.startswith(prefix)
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["HCXVisionV2ForCausalLM"], "model_type": "vlm"}
    config["vision_config"]["model_type"] = "qwen2_5_vl"
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_tokens_of_published_files(vision, published):
    source = vision("hyperclova")
    model = Vision(published, source.model)
    for images in ((), (picture(40, 30),)):
        request = f"{' and '.join([source.mark] * len(images))} what", images
        assert model.run(model.engine(), request)[0] == [source.expected(*request)]


def test_quantized_files_keep_the_tower(published, tmp_path):
    folder = tmp_path / "model"
    scheme = Scheme.parse("w8a16-sym-g32")
    quantize_checkpoint(published, folder, scheme=scheme, recipe="rtn", progress=False)
    found, source = CheckpointReader(folder), CheckpointReader(published)
    assert found.other_parts.keys() == source.other_parts.keys()
    assert found.whole_config["architectures"] == ["HCXVisionV2ForCausalLM"]
    want = logits(published)
    assert (logits(folder) - want).norm() / want.norm() < 0.1
    assert torch.equal(found.get("lm_head.weight"), source.get("lm_head.weight"))
