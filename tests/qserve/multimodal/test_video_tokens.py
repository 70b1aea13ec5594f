"""Greedy tokens and positions of prompts with videos are transformers', however steps are cut."""

import json

import numpy as np
import pytest
import torch

from formats.errors import InputError
from qserve.multimodal.positions import positions_of
from qserve.multimodal.tower import frames_of
from qserve.params.request_options import RequestOptions
from qserve.params.sampling_params import SamplingParams
from tests.qserve.multimodal.conftest import NUM_TOKENS
from tests.tiny_vision import film, picture

VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
FAMILIES = [
    pytest.param("qwen2_vl", marks=pytest.mark.exhaustive),
    "qwen3_vl",
    "qwen2_5_vl",
    *(
        pytest.param(name, marks=pytest.mark.exhaustive)
        for name in ("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
    ),
]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, vision):
    return vision(request.param)


def requests_of():
    """One video, an odd number of frames next to an image, two videos of odd sizes, text alone."""
    slow, odd = (film(30, 40, 30, 1), {"fps": 10.0}), (film(7, 70, 21, 2), {"fps": 3.7})
    few = [picture(33, 50, seed) for seed in (5, 6)]
    whole = (film(5, 48, 16, 3), {"fps": 1.5, "do_sample_frames": False})
    return [
        (f"look: {VIDEO} what is it", (), (slow,)),
        (f"{IMAGE} beside {VIDEO} differs", (picture(64, 40, 2),), (odd,)),
        (f"{VIDEO} and {VIDEO} then {IMAGE} end", (picture(30, 30, 3),), (few, whole)),
        ("what is a page table", (), ()),
    ]


def test_tokens_of_videos(model):
    engine = model.engine()
    for request in requests_of():
        (found,), _ = model.run(engine, request)
        assert found == model.expected(*request)
    words, _, videos = requests_of()[0]
    other = (words, (), ((film(30, 40, 30, 9), {"fps": 10.0}),))
    assert model.expected(*other) != model.expected(words, (), videos), "it sees no video"


@pytest.mark.parametrize("budget", [4, 7, 23])
def test_tokens_of_a_batch_in_chunks_that_cut_videos(model, budget):
    engine = model.engine(1, max_num_batched_tokens=budget)
    found, _ = model.run(engine, *requests_of())
    assert found == [model.expected(*request) for request in requests_of()]


@pytest.mark.exhaustive
def test_second_turn_finds_the_pages_of_the_first(model):
    engine = model.engine()
    for text, images, videos in requests_of()[:3]:
        (first,), _ = model.run(engine, (text, images, videos))
        said = model.processor._encode(text, True)
        more = [*said, *first, *model.processor._encode(" and then what", False)]
        (found,), (event,) = model.run(engine, (more, images, videos))
        assert found == model.expected(tuple(more), images, videos)
        length = len(model.prompt(text, images, videos)[0]) + NUM_TOKENS
        assert event.facts.num_cached >= length - 8 or engine.runner.has_states


def test_pages_of_another_speed_are_not_shared(model):
    """Equal frames have other positions or times if they follow each other at another speed."""
    frames, engine = film(4, 32, 32, 4), model.engine()
    requests = [
        (f"see {VIDEO} there", (), ((frames, {"fps": fps, "do_sample_frames": False}),))
        for fps in (2.0, 0.3)
    ]
    for request in requests:
        (found,), (event,) = model.run(engine, request)
        assert found == model.expected(*request) and event.facts.num_cached < 8
    (first, second) = (model.prompt(*request)[1] for request in requests)
    assert [each.num_embeds for each in first] == [each.num_embeds for each in second]


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_tokens_with_drafts(vision, family):
    model = vision(family)
    drafter = {"method": "draft_model", "num_speculative_tokens": 3, "model": str(model.folder)}
    engine = model.engine(1, speculative_config=json.dumps(drafter), max_num_batched_tokens=16)
    for _ in range(2):  # the second time on the pages of the first
        found, _ = model.run(engine, *requests_of())
        assert found == [model.expected(*request) for request in requests_of()]
    verifies, *_ = engine.scheduler.speculation.take_counts()
    assert verifies


def test_tokens_after_preemptions(model):
    requests = requests_of()
    pages = [-(-len(model.prompt(*request)[0]) // 4) for request in requests]
    # The prompts fit, but not their outputs.
    engine = model.engine(
        num_gpu_blocks_override=sum(pages) + 1, max_num_batched_tokens=64, admission="fits"
    )
    found, events = model.run(engine, *requests)
    assert found == [model.expected(*request) for request in requests]
    assert sum(event.facts.num_preemptions for event in events)


def test_positions_are_those_of_transformers(model):
    for text, images, videos in requests_of()[:3]:
        ids, items = model.prompt(text, images, videos)
        inputs = model.inputs(ids, images, videos)
        names = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "mm_token_type_ids")
        want, _ = model.model.model.get_rope_index(
            inputs["input_ids"], **{name: inputs[name] for name in names if name in inputs}
        )
        found, shift = positions_of(items)
        later = np.tile(np.arange(found.shape[1], len(ids)) + shift, (3, 1))
        assert np.array_equal(np.concatenate([found, later], 1), want[:, 0].numpy())


def test_frames_of_one_item_are_encoded_alone(vision):
    """A long video does not need the memory of all its frames together."""
    model = vision("qwen2_5_vl")
    _, (item,) = model.prompt(VIDEO, (), ((film(12, 40, 30), {"fps": 2.0}),))
    frames = frames_of(item)
    assert item.grid[0] == len(frames) == 6
    pixels = [{each.name: each.array() for each in frame.features} for frame in frames]
    (whole,) = [each.array() for each in item.features if each.name == "pixel_values"]
    assert np.array_equal(np.concatenate([each["pixel_values"] for each in pixels]), whole)
    sides = [2 * side for side in item.grid[1:]]
    assert all(each["image_grid_thw"].tolist() == [1, *sides] for each in pixels)
    tower = model.engine().runner.encoder.tower
    (found,) = tower.encode([item])
    inputs = model.video_inputs(((film(12, 40, 30), {"fps": 2.0}),))
    with torch.no_grad():
        want = model.model.model.get_video_features(
            inputs["pixel_values_videos"], inputs["video_grid_thw"]
        ).pooler_output[0]
    assert torch.allclose(found, want, atol=1e-5)


def test_a_video_beyond_the_last_position_is_refused(vision):
    model = vision("qwen2_5_vl")
    slow = (film(4, 32, 32), {"fps": 0.001, "do_sample_frames": False})
    ids, media = model.prompt(VIDEO, (), (slow,))
    engine = model.engine()
    with pytest.raises(InputError, match="has a video whose time reaches position 400"):
        engine.add_request("r", ids, SamplingParams(), options=RequestOptions(media=media))
    assert not engine.has_work()


def test_numbers_of_placeholders(vision):
    model, video = vision("qwen3_vl"), film(4, 32, 32)
    for text, videos in ((VIDEO, ()), ("none", (video,)), (VIDEO, (video, video))):
        with pytest.raises(InputError, match=r"placeholders for \d videos .write token"):
            model.prompt(text, (), videos)
    with pytest.raises(InputError, match="videos: are not taken by Llava.* .give frames as images"):
        vision("llava").prompt("<image>", (picture(3, 3),), (video,))
