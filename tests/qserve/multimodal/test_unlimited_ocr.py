"""Unlimited-OCR: queries attend to the whole prompt, and to the last tokens of the output only."""

import itertools
import json
import shutil
from dataclasses import replace

import pytest
import torch

from formats.architecture.text_part import text_config
from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError, InputError
from qserve.engine.request import Request
from qserve.multimodal.families import VisionConfig
from qserve.multimodal.image_processors.own_processor import OwnImageProcessor
from qserve.params.beam_search_params import BeamSearchParams
from qserve.params.request_options import RequestOptions
from qserve.params.sampling_params import SamplingParams
from tests.qserve.multimodal.conftest import NUM_TOKENS, Vision
from tests.tiny_vision import picture
from tests.tiny_vision.views import DETAILS, published

FAMILY, WINDOW = "unlimited_ocr", 3


def requests_of(model):
    mark = model.mark
    return [("what is a page table", ()), (f"{mark} what", (picture(40, 30, 1),))]


@pytest.fixture(scope="module")
def folder(vision, tmp_path_factory):
    """The tiny model with a config.json as published."""
    target = tmp_path_factory.mktemp("published") / FAMILY
    shutil.copytree(vision(FAMILY).folder, target)
    stated = json.loads((target / "config.json").read_text())
    config = published({**stated, "model_type": "deepseek"})
    config |= {"architectures": ["UnlimitedOCRForCausalLM"], "model_type": "unlimited-ocr"}
    config["language_config"].pop("layer_types", None)
    config |= {"sliding_window": WINDOW, "sliding_window_size": WINDOW}
    assert "sliding_window" in DETAILS and "sliding_window" not in config["language_config"]
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_tokens_of_published_files(vision, folder):
    source = vision(FAMILY)
    model = Vision(folder, source.model)
    for request in requests_of(source):
        assert model.run(model.engine(), request)[0] == [source.expected(*request)]
    with pytest.raises(InputError, match="--speculative-config: does not work with .* output has"):
        model.engine(speculative_config='{"method": "ngram", "num_speculative_tokens": 2}')


@pytest.mark.parametrize("window", [0, WINDOW - 1, WINDOW + 1])
def test_other_windows_give_other_tokens(vision, window):
    model = vision(FAMILY)
    engine = model.engine()
    processor = engine._input_processor
    processor._model = replace(processor._model, output_window=window)
    found, _ = model.run(engine, *requests_of(model))
    assert found != [model.expected(*request) for request in requests_of(model)]


def test_pages_do_not_grow_with_the_output(vision):
    """A long output needs pages for the prompt and the window; none of its pages are shared."""
    model = vision(FAMILY)
    ids, _ = model.prompt("what is a page table")
    pages = -(-(len(ids) + WINDOW) // 4)
    engine = model.engine(num_gpu_blocks_override=pages, max_model_len=256)
    engine.add_request("a", ids, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    first = []
    while engine.has_work():
        made = [token for event in engine.step() for token in event.token_ids]
        first += made
        if made and len(first) == 12:
            engine.scheduler.preempt_all()  # it then needs no more pages than before
    assert len(first) == 20
    longer = [*ids, *first[:12]]
    engine = model.engine(max_model_len=256)
    for number, prompt in enumerate((ids, longer)):
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        engine.add_request(str(number), prompt, params)
        last = list(run(engine))[-1]
    assert last.facts.num_cached <= len(ids)


def run(engine):
    while engine.has_work():
        yield from engine.step()


@pytest.mark.parametrize("budget", [4, 64])
def test_long_outputs_are_those_of_transformers(vision, budget):
    """Many times the window, of two requests that are preempted in the middle."""
    model = vision(FAMILY)
    ids, _ = model.prompt("what is a page table")
    want, engine = generated(model, ids), model.engine(max_num_batched_tokens=budget)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = {"a": [], "b": []}
    for name in outputs:
        engine.add_request(name, ids, params)
    for number in itertools.count():
        if not engine.has_work():
            break
        for event in engine.step():
            outputs[event.request_id] += event.token_ids
        if number in (8, 20):
            engine.scheduler.preempt_all()
        engine.scheduler.check_integrity()
    assert outputs == {"a": want, "b": want}


def test_outputs_take_no_pages_of_prompts(vision):
    """A prompt with the same tokens has other keys: there, they attend to all before them."""
    model = vision(FAMILY)
    ids, _ = model.prompt("what is a page table")
    want = generated(model, ids)
    engine, found = model.engine(), []
    engine.add_request("a", ids, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    while engine.has_work():
        made = [event for event in engine.step() if event.request_id == "a"]
        found += [token for event in made for token in event.token_ids]
        if made and len(found) == 14:
            longer = [*ids, *want[:18]]
            engine.add_request("b", longer, SamplingParams(temperature=0, max_tokens=1))
        if made and len(found) == 18:
            engine.scheduler.preempt_all()
    assert found == want


def generated(model, ids):
    """24 greedy tokens of transformers."""
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))}
    found = model.model.generate(**inputs, max_new_tokens=24, do_sample=False)
    return found[0, len(ids) :].tolist()


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_tokens_of_ranks(vision, ranks):
    model = vision(FAMILY)
    engine = model.engine(1, **ranks, max_num_batched_tokens=23)
    try:
        found, _ = model.run(engine, *requests_of(model))
    finally:
        engine.close()
    assert found == [model.expected(*request) for request in requests_of(model)]


def test_beam_search_is_refused(vision):
    engine = vision(FAMILY).engine()
    options = RequestOptions(beam_search=BeamSearchParams(beam_width=2, max_tokens=4))
    with pytest.raises(InputError, match="use_beam_search: is not supported with this model"):
        engine.add_request("a", [1, 2], SamplingParams(), options=options)


def test_slots_of_a_request():
    request = Request(
        request_id="a",
        token_ids=[1, 2, 3, 4, 5],
        num_prompt_tokens=5,
        max_tokens=20,
        params=SamplingParams(),
        seed=0,
        stop_token_ids=frozenset(),
        eos_token_ids=frozenset(),
        output_window=3,
    )
    assert [request.num_slots(n) for n in (4, 5, 7, 8, 9, 25)] == [4, 5, 7, 8, 8, 8]


def test_windows_that_cannot_be_are_refused(vision):
    config = CheckpointReader(vision(FAMILY).folder).whole_config
    for key, value in (("sliding_window", 0), ("layer_types", ["full_attention"] * 3)):
        wrong = {**config, "text_config": {**config["text_config"], key: value}}
        with pytest.raises(CheckpointError, match=f"config.json {key}: expected"):
            text_config(wrong, ())


def test_options_are_those_of_the_published_model(tmp_path, folder):
    assert OwnImageProcessor(tmp_path, "unlimited_ocr").options["max_patches"] == 32
    values = json.loads((folder / "config.json").read_text())
    assert VisionConfig.of(values).values["model_type"] == "unlimited_ocr"
    assert NUM_TOKENS > 2 * WINDOW  # the other tests replace keys more than once
