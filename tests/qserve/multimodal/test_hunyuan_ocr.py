"""HunyuanOCR: positions of four axes, and files as published (a flat config.json, other names)."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate.pipeline import quantize_checkpoint
from formats.architecture.rope_types import axes_of_halves
from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.scheme import Scheme
from qserve.multimodal.media import MediaItem
from qserve.multimodal.positions import Axes, positions_of
from tests.qserve.multimodal.conftest import Vision
from tests.tiny_vision import picture

DIGEST = "0" * 64
# names in transformers' model -> in Tencent's files
NAMES = {
    "model.vision_tower.": "vit.",
    ".mlp.fc1.": ".mlp.dense_h_to_4h.",
    ".mlp.fc2.": ".mlp.dense_4h_to_h.",
    ".layer_norm1.": ".input_layernorm.",
    ".layer_norm2.": ".post_attention_layernorm.",
    ".patch_merger.proj_conv.": ".perceive.proj.0.",
    ".patch_merger.proj_out.": ".perceive.proj.2.",
    ".patch_merger.": ".perceive.",
    "model.language_model.": "model.",
}


@pytest.fixture(scope="module")
def published(vision, tmp_path_factory):
    folder = tmp_path_factory.mktemp("published") / "hunyuan_ocr"
    shutil.copytree(vision("hunyuan_ocr").folder, folder)
    state = {}
    for name, tensor in vision("hunyuan_ocr").model.state_dict().items():
        for before, after in NAMES.items():
            name = name.replace(before, after)
        state[name] = tensor.clone()
    assert {name.split(".")[0] for name in state} == {"model", "vit", "lm_head"}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    config |= {key: value for key, value in text.items() if key != "model_type"}
    config |= {"rope_theta": rope["rope_theta"], "attention_head_dim": text["head_dim"]}
    config["rope_scaling"] = {
        **{"type": "xdrope", "xdrope_section": rope["mrope_section"], "alpha": rope["alpha"]},
        **{"factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    }
    config["vision_config"]["model_type"] = "hunyuan_vl"
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_tokens_are_those_of_transformers(vision, published):
    source = vision("hunyuan_ocr")
    model = Vision(published, source.model)
    for images in ((), (picture(40, 30, 1),), (picture(64, 30, 2), picture(20, 70, 3))):
        request = f"{' and '.join([source.mark] * len(images))} what", images
        assert model.run(model.engine(), request)[0] == [source.expected(*request)]


def test_quantized_files_keep_the_tower(published, tmp_path):
    target, scheme = tmp_path / "quantized", Scheme.parse("w4a16-sym-g32")
    quantize_checkpoint(published, target, scheme=scheme, recipe="rtn", progress=False)
    before, after = (load_file(path / "model.safetensors") for path in (published, target))
    tower = [name for name in before if name.startswith("vit.")]
    assert tower and all(torch.equal(before[name], after[name]) for name in tower)
    found = CheckpointReader(target).whole_config
    assert found["model_type"] == "hunyuan_vl" and "text_config" not in found
    ignored = found["quantization_config"]["ignore"]
    assert {"re:.*vit.*", "re:.*vision_tower.*"} <= set(ignored)


def item(offset, rows, columns):
    return MediaItem(
        kind="image",
        digest=DIGEST,
        offset=offset,
        length=rows * columns + 2,
        grid=(1, rows, columns),
        num_outer=1,
    )


@pytest.mark.parametrize("count", [3, 4])
def test_positions_are_those_of_transformers(vision, monkeypatch, count):
    model = vision("hunyuan_ocr").model.model
    ropes = {**model.config.text_config.rope_parameters, "mrope_section": [2] * count}
    monkeypatch.setattr(model.config.text_config, "rope_parameters", ropes)
    items, kinds = [], []
    for length, rows, columns in ((3, 2, 4), (1, 1, 2), (2, 3, 2)):
        kinds += [0] * length
        items.append(item(len(kinds), rows, columns))
        kinds += [1] * items[-1].length
    want, shift = model.get_rope_index(
        torch.zeros(1, len(kinds), dtype=torch.long),
        torch.tensor([kinds], dtype=torch.int),
        torch.tensor([[1, 2 * each.grid[1], 2 * each.grid[2] - 2] for each in items]),
    )
    found, offset = positions_of(items, Axes(count, counts_images=True))
    assert np.array_equal(found, want[:, 0].numpy())
    assert offset == int(shift) == 0


def test_axes_of_halves_are_of_channels():
    assert axes_of_halves([1, 2, 3, 2], 8) == ([0, 0, 1, 1, 1, 1, 2, 2], [2, 2, 2, 2, 3, 3, 3, 3])
    for wrong in ([4, 4], [1, 2, 3, 4], []):
        with pytest.raises(InputError, match="mrope_section: expected at least three numbers"):
            axes_of_halves(wrong, 8)


@pytest.mark.parametrize(
    ("different", "words"),
    [
        ({"num_outer": 2}, "media grid: expected 3 numbers of product 4, found"),
        ({"grid": ()}, "media num_outer: expected 0, found 1"),
        ({"num_outer": -1}, "media num_outer: expected 0, found -1"),
    ],
)
def test_items_that_cannot_be_are_refused(different, words):
    values = {"kind": "image", "digest": DIGEST, "offset": 0, "length": 8, "grid": (1, 2, 3)}
    assert MediaItem(**values, num_outer=1).num_outer == 1
    with pytest.raises(InputError, match=words):
        MediaItem(**{**values, "num_outer": 1, **different})
