"""MiniCPM-V 4.6 and MiniCPM-OCR: the text around its slices is that of transformers' processor."""

import json
import shutil
from types import SimpleNamespace

import pytest
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor

from formats.errors import CheckpointError
from qserve.multimodal.processor import load_image_processor
from qserve.text.tokenizer import Tokenizer
from tests.qserve.multimodal.conftest import Vision
from tests.tiny_vision import picture

MARKS = {
    **{"image_start_token": "<image>", "image_end_token": "</image>"},
    **{"slice_start_token": "<slice>", "slice_end_token": "</slice>"},
    **{"image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>"},
    **{"image_token": "<|image_pad|>", "slice_mode": True},
}
SIZES = [(1, 1), (40, 30), (30, 40), (64, 64), (100, 20), (20, 130), (33, 32), (300, 100)]


def texts_of(folder, images, divisor):
    """transformers' text of each image."""
    found = load_image_processor(folder)(images=images, downsample_mode=f"{divisor}x")
    processor = SimpleNamespace(**MARKS)
    return MiniCPMV4_6Processor._prepend_local_ids(
        processor,
        [MARKS["image_token"] * len(images)],
        [
            MiniCPMV4_6Processor.replace_image_token(
                processor, found, number, image_token_divisor=divisor
            )
            for number in range(len(images))
        ],
        MARKS["image_token"],
    )


@pytest.mark.parametrize("divisor", [4, 16])
def test_tokens_are_those_of_transformers(vision, tmp_path, divisor):
    source = vision("minicpm_v")
    folder = shutil.copytree(source.folder, tmp_path / "minicpm_v")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "downsample_mode": f"{divisor}x"}))
    model, encode = Vision(folder, source.model), Tokenizer(folder).encode
    images = [picture(*size, number) for number, size in enumerate(SIZES)]
    ids, items = model.prompt(" and ".join([model.mark] * len(images)), images)
    texts = texts_of(folder, images, divisor)
    assert any("\n" in text for text in texts) and any("<slice>" not in text for text in texts)
    assert ids == encode(" and ".join(texts), True)
    token = model.processor.config.image_token_id
    assert sum(item.length for item in items) == ids.count(token)


def test_tokens_with_four_times_as_many_embeddings(vision, tmp_path):
    """The tower then skips the layer that merges windows."""
    source = vision("minicpm_v")
    folder = shutil.copytree(source.folder, tmp_path / "minicpm_v")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "downsample_mode": "4x"}))
    model = Vision(folder)
    request = f"{model.mark} what", (picture(40, 30, 2),)
    assert len(model.prompt(*request)[0]) > 2 * len(source.prompt(*request)[0])
    assert model.run(model.engine(), request)[0] == [model.expected(*request)]


def test_other_scaling_of_small_images_is_refused(vision, tmp_path):
    source = vision("minicpm_ocr")
    folder = shutil.copytree(source.folder, tmp_path / "minicpm_ocr")
    options = json.loads((folder / "preprocessor_config.json").read_text())
    for value in ("always", "adaptive"):
        options["small_image_upsize"] = value
        (folder / "preprocessor_config.json").write_text(json.dumps(options))
        if value == "always":
            load_image_processor(folder)
            continue
        with pytest.raises(CheckpointError, match="small_image_upsize: expected 'always'"):
            load_image_processor(folder)


def test_images_without_numbers(vision, tmp_path):
    source = vision("minicpm_v")
    folder = shutil.copytree(source.folder, tmp_path / "minicpm_v")
    options = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps({**options, "use_image_id": False}))
    request = f"{source.mark} what", (picture(10, 10, 2),)
    numbered, plain = (each.prompt(*request)[0] for each in (source, Vision(folder, source.model)))
    assert len(numbered) == len(plain) + 3 and numbered[-len(plain) :] == plain
