"""Intern-S2-Preview: Qwen3.5-MoE under other names, with additional tensors of time series."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate.pipeline import quantize_checkpoint
from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.scheme import Scheme
from tests.qserve.model.variants import logits
from tests.qserve.multimodal.conftest import Vision
from tests.tiny_vision import picture

TIME_SERIES = "model.time_series.encoder.weight"


@pytest.fixture(scope="module", params=["qwen3_5_moe_text", "interns2_preview_text"])
def published(request, vision, tmp_path_factory):
    folder = tmp_path_factory.mktemp("published") / "qwen3_5_moe"
    shutil.copytree(vision("qwen3_5_moe").folder, folder)
    state = load_file(folder / "model.safetensors")
    state |= {TIME_SERIES: torch.ones(3, 32), "mtp.fc.weight": torch.ones(64, 128)}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["InternS2PreviewForConditionalGeneration"],
        "model_type": "intern_s2_preview",
        "ts_config": {"model_type": "interns2_preview_time_series"},
    }
    config["vision_config"]["model_type"] = "intern_s2_preview"
    config["text_config"]["model_type"] = request.param
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_tokens_are_those_of_qwen(vision, published):
    source = vision("qwen3_5_moe")
    model = Vision(published, source.model)
    for images in ((), (picture(40, 30),), (picture(40, 30), picture(24, 50, seed=3))):
        request = f"{' and '.join([source.mark] * len(images))} what", images
        assert model.run(model.engine(), request)[0] == [source.expected(*request)]


def test_the_tower_and_time_series_are_kept(published, tmp_path):
    folder = tmp_path / "model"
    scheme = Scheme.parse("w4a16-sym-g32")
    quantize_checkpoint(published, folder, scheme=scheme, recipe="rtn", progress=False)
    found = CheckpointReader(folder)
    assert TIME_SERIES in found.other_parts
    assert found.other_parts.keys() == CheckpointReader(published).other_parts.keys()
    assert found.whole_config["model_type"] == "intern_s2_preview"
    ignored = found.whole_config["quantization_config"]["ignore"]
    assert {"re:.*visual.*", "re:.*time_series.*"} <= set(ignored)
    assert logits(folder).isfinite().all()


def test_another_text_model_is_refused(published, tmp_path):
    folder = shutil.copytree(published, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["model_type"] = "interns3_text"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="InternS2PreviewForConditionalGeneration"):
        logits(folder)
