"""Images on several ranks: the tokens are transformers'.

Tensor parallel ranks encode each image. Of pipeline stages the first one does, and later ones add
its rows of deepstack to their layers.
"""

import numpy as np
import pytest
import torch

from qserve.engine.distributed import executors
from qserve.engine.runner import microbatches
from tests.qserve.multimodal.test_image_tokens import requests_of
from tests.qserve.parallel.rank_of_small_parts import MIN_TOKENS
from tests.tiny_vision import VISION_FAMILIES, film

# Positions of three axes, and rows that the first layers add.
DEFAULT = "qwen3_vl"
# models with states have one stage
STATES = ("qwen3_5", "qwen3_5_moe", "lfm2_vl", "minicpm_v", "minicpm_ocr", "nemotron_omni")
FAMILIES = [
    pytest.param(name, marks=() if name == DEFAULT else pytest.mark.exhaustive)
    for name in VISION_FAMILIES
]


def has_mutual_prompt(model):
    """Pages are then found again for the same prompt alone."""
    return model.processor.config.family.has_mutual_prompt


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_two_ranks(family, vision):
    model = vision(family)
    engine = model.engine(tensor_parallel_size=2, max_num_batched_tokens=23)
    try:
        requests = requests_of(model)
        found, _ = model.run(engine, *requests)
        assert found == [model.expected(*request) for request in requests]
        _, (text, images), *_ = requests
        longer = text if has_mutual_prompt(model) else f"{text} and then"
        (again,), (event,) = model.run(engine, (longer, images))  # its rows are on both ranks
        assert again == model.expected(longer, images)
        # snapshots of states are farther apart than these prompts are long
        assert (event.facts.num_cached > 0) == (family not in STATES)
    finally:
        engine.close()


@pytest.fixture
def small_parts(monkeypatch):
    """Steps of a few tokens are divided into microbatches."""
    monkeypatch.setattr(microbatches, "MIN_TOKENS", MIN_TOKENS)
    monkeypatch.setattr(executors, "MODULE", "tests.qserve.parallel.rank_of_small_parts")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "family", [name for name in VISION_FAMILIES if name not in (*STATES, "gemma4_shared")]
)
@pytest.mark.parametrize(("stages", "tensor"), [(2, 1), (3, 1), (2, 2)])
def test_tokens_of_stages(family, stages, tensor, vision, small_parts):
    """With three stages each has one layer: the second adds the second level of Qwen3-VL."""
    if (stages, tensor) != (2, 1) and family not in ("qwen3_vl", "gemma3"):
        pytest.skip("as with two stages")
    model = vision(family)
    ranks = {"pipeline_parallel_size": stages, "tensor_parallel_size": tensor}
    engine = model.engine(1, **ranks, max_num_batched_tokens=31)
    try:
        requests = requests_of(model)
        found, _ = model.run(engine, *requests)
        assert found == [model.expected(*request) for request in requests]
        _, (text, images), *_ = requests
        longer = text if has_mutual_prompt(model) else f"{text} and then"
        (again,), (event,) = model.run(engine, (longer, images))
        assert again == model.expected(longer, images)
        assert event.facts.num_cached > 0
        ids, media = model.prompt(text, images)
        logits_SV = model._logits(ids, model.inputs(ids, images), ids)
        torch.testing.assert_close(engine.logits(ids, media), logits_SV, rtol=1e-3, atol=1e-3)
    finally:
        engine.close()


@pytest.mark.exhaustive
def test_tokens_of_a_video_in_stages(vision, small_parts):
    model = vision("qwen3_vl")
    engine = model.engine(pipeline_parallel_size=2, max_num_batched_tokens=23)
    try:
        request = ("see <|vision_start|><|video_pad|><|vision_end|> now", (), (film(6, 40, 40),))
        assert model.run(engine, request)[0] == [model.expected(*request)]
    finally:
        engine.close()


def test_microbatches_do_not_cut_images_whose_rows_see_each_other():
    """No end lies after a row that sees keys after its own."""
    keys_ahead_T = np.array([0, 0, 3, 2, 1, 0, 2, 1, 0, 0])
    assert microbatches._outside_images([0, 2, 4, 7, 9, 10], keys_ahead_T) == [0, 2, 6, 9, 10]
    assert microbatches._outside_images([0, 3, 6, 10], keys_ahead_T) == [0, 2, 6, 10]
