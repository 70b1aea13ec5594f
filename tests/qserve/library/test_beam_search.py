"""Beam search against transformers: tokens and scores, in float32, under every pressure."""

import random
from functools import cache
from itertools import product

import pytest
import torch

from formats.errors import InputError
from qserve import LLM
from qserve.config import EngineConfig
from qserve.engine.engine import Engine
from qserve.engine.kv_cache import state_snapshots
from qserve.engine.request import Status
from qserve.library.beam_outputs import sampling_params
from qserve.params.beam_search_params import BeamSearchParams
from qserve.params.request_options import RequestOptions
from qserve.params.sampling_params import SamplingParams
from tests.qserve.model.test_hybrid_tokens import in_transformers

FAMILIES = ["llama", "mistral"]
MORE = ["gemma2", "phi3", "ministral3", "granite", "olmo2", "glm4", "qwen3", "smollm3"]
HYBRID = ["qwen3_5", "granite_hybrid", "lfm2", "falcon_h1", "kimi_linear", "minimax"]
HYBRID += ["qwen3_next", "nemotron_h"]
LOADED = ["kimi_linear", "minimax"]  # transformers itself reads their names
# width, returned, length penalty, early stopping, whether beams may end before the length
CASES = [
    (4, 2, 1.0, False, True),
    (3, 3, 0.0, True, True),
    (5, 1, 2.0, "never", True),
    (2, 2, -1.5, False, True),
    (4, 4, 1.0, False, False),
]
MODES = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 7, "max_num_seqs": 7},
    "without prefix cache": {"enable_prefix_caching": False},
    "few pages": {
        "num_gpu_blocks_override": 22,
        "admission": "fits",
        "block_size": 4,
        "max_num_seqs": 10,
    },
}
LENGTH = 12


def prompts_of(lengths=(9, 17, 26, 5)):
    rng = random.Random(3)
    return [tuple(rng.randrange(3, 512) for _ in range(n)) for n in lengths]


@cache
def reference(model, prompt, ends, width, returned, penalty, early, max_tokens=LENGTH):
    """transformers' beams: tokens without padding, and scores."""
    with torch.no_grad():
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            num_beams=width,
            num_return_sequences=returned,
            length_penalty=penalty,
            early_stopping=early,
            max_new_tokens=max_tokens,
            eos_token_id=list(ends) or None,
            pad_token_id=511,
            return_dict_in_generate=True,
            output_scores=True,
            # its cache of lightning attention does not follow the beams
            use_cache=model.config.model_type != "minimax",
        )
    beams = []
    for row in found.sequences[:, len(prompt) :].tolist():
        end = next((index for index, token in enumerate(row) if token in ends), len(row) - 1)
        beams.append(row[: end + 1])
    return beams, found.sequences_scores.tolist()


def greedy_tokens(model, prompt):
    with torch.no_grad():
        mask = torch.ones(1, len(prompt), dtype=torch.long)
        found = model.generate(
            torch.tensor([prompt]), attention_mask=mask, do_sample=False, max_new_tokens=LENGTH
        )
    return found[0, len(prompt) :].tolist()


def frequent_tokens(model, prompts, count=3):
    """Tokens that beams without an end have often, but not at their start."""
    counts = {}
    for prompt in prompts:
        for beam in reference(model, prompt, (), 4, 4, 1.0, False)[0]:
            for token in beam[2:]:
                counts[token] = counts.get(token, 0) + 1
    return tuple(sorted(counts, key=counts.get)[-count:])


def params_of(case, ends, **more):
    width, returned, penalty, early, may_end = case
    return BeamSearchParams(
        beam_width=width,
        n=returned,
        length_penalty=penalty,
        early_stopping=early,
        max_tokens=LENGTH,
        ignore_eos=True,
        stop_token_ids=ends if may_end else (),
        include_stop_str_in_output=True,
        **more,
    )


@pytest.fixture(scope="module")
def ends_of(tiny_model, transformers_model):
    made = {}

    def find(name):
        if name not in made:
            load = in_transformers if name in LOADED else transformers_model
            model = load(tiny_model(name))
            model.generation_config.eos_token_id = None
            made[name] = model, frequent_tokens(model, prompts_of((9, 26)))
        return made[name]

    return find


def check(model, ends, prompts, outputs, case):
    width, returned, penalty, early, may_end = case
    num_ended = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        want, scores = reference(
            model, prompt, ends if may_end else (), width, returned, penalty, early
        )
        got = [each.tokens[len(prompt) :] for each in output.sequences]
        assert got == want
        assert [each.score for each in output.sequences] == pytest.approx(
            scores, rel=1e-5, abs=2e-5
        )
        num_ended += sum(each.finish_reason == "stop" for each in output.sequences)
    return num_ended


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    [*FAMILIES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in (*MORE, *HYBRID))],
)
def test_beams_equal_transformers(tiny_model, ends_of, name):
    model, ends = ends_of(name)
    prompts = prompts_of((9, 26))
    llm = LLM(str(tiny_model(name)), device="cpu", max_model_len=64, block_size=8)
    num_ended = 0
    for case in CASES:
        outputs = llm.beam_search(prompts, params_of(case, ends), detokenize=False)
        num_ended += check(model, ends, prompts, outputs, case)
    assert num_ended >= 2  # ends inside beams were met
    llm.engine.scheduler.check_integrity()
    assert llm.engine.scheduler.pool.num_free == llm.engine.scheduler.pool.num_pages


@pytest.mark.parametrize(
    ("name", "mode", "steps_in_flight"),
    [
        *product(["llama"], MODES, (0, 1)),
        ("qwen3_5", "few pages", 1),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in product(HYBRID, MODES, (0, 1))
            if case != ("qwen3_5", "few pages", 1)
        ),
    ],
)
def test_beams_equal_with_chunks_and_preemption(
    tiny_model, ends_of, monkeypatch, name, mode, steps_in_flight
):
    """Chunked prompts, preempted rows and concurrent requests give the same beams."""
    monkeypatch.setattr(state_snapshots, "SPACING", 8)
    monkeypatch.setattr(state_snapshots, "MIN_GAIN", 4)
    model, ends = ends_of(name)
    case, prompts = CASES[0], prompts_of()
    settings = {"device": "cpu", "max_model_len": 64, "block_size": 8} | MODES[mode]
    if name in HYBRID and mode == "few pages":  # rows that come back share none
        settings |= {"num_gpu_blocks_override": 40, "max_num_seqs": 20}
    engine = Engine(
        EngineConfig(model=str(tiny_model(name)), **settings), steps_in_flight=steps_in_flight
    )
    for each in engine.runner.caches:
        for tensor in each.slot_tensors:  # what no request has written
            tensor.fill_(torch.nan)
    preempted = []
    preempt = engine.scheduler.running_set.preempt
    monkeypatch.setattr(
        engine.scheduler.running_set,
        "preempt",
        lambda request, step: (preempted.append(request), preempt(request, step)),
    )
    params = params_of(case, ends)
    greedy = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add_request(f"greedy {index}", list(prompt), greedy)
        engine.add_request(
            f"beams {index}",
            list(prompt),
            sampling_params(params),
            options=RequestOptions(beam_search=params),
        )
    texts, beams = {}, {}
    while engine.has_work():
        for event in engine.step():
            assert event.finish_reason != "error", event
            if event.request_id.startswith("beams"):
                beams[event.request_id] = event.beams
            else:
                texts.setdefault(event.request_id, []).extend(event.token_ids)
        engine.scheduler.check_integrity()
    groups = [each for each in preempted if each.beams is not None]
    assert bool(groups) == (mode == "few pages"), "the pressure is not what was meant"
    for index, prompt in enumerate(prompts):
        want, scores = reference(model, prompt, ends, *case[:4])
        found = beams[f"beams {index}"]
        assert [list(each.token_ids) for each in found] == want
        assert [each.score for each in found] == pytest.approx(scores, rel=1e-5, abs=2e-5)
        assert texts[f"greedy {index}"] == greedy_tokens(model, prompt)
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_pages


def test_pages_are_shared_between_beams(tiny_model):
    """Eight beams of a prompt of six pages hold its pages once, and a few of their own."""
    config = EngineConfig(
        model=str(tiny_model("llama")), device="cpu", max_model_len=64, block_size=8
    )
    engine = Engine(config)
    params = BeamSearchParams(beam_width=8, max_tokens=7, ignore_eos=True)
    prompt = list(prompts_of([48])[0])
    engine.add_request(
        "0", prompt, sampling_params(params), options=RequestOptions(beam_search=params)
    )
    most = 0
    while engine.has_work():
        engine.step()
        pool = engine.scheduler.pool
        most = max(most, pool.num_pages - pool.num_free)
        rows = [each for each in engine.scheduler.running if each.block_table]
        starts = {tuple(each.block_table[:6]) for each in rows}
        assert len(starts) <= 1
    assert 6 + 2 < most <= 6 + 8


def test_abort_frees_all_rows(tiny_model):
    config = EngineConfig(
        model=str(tiny_model("llama")), device="cpu", max_model_len=64, block_size=8
    )
    params = BeamSearchParams(beam_width=4, max_tokens=20, ignore_eos=True)
    for steps_before, in_flight in product((0, 1, 2, 5), (0, 1)):
        engine = Engine(config, steps_in_flight=in_flight)
        engine.add_request(
            "0",
            [5, 6, 7],
            sampling_params(params),
            options=RequestOptions(beam_search=params),
        )
        (request,) = engine._requests.values()
        for _ in range(steps_before):
            engine.step()
        engine.abort("0")
        while engine.has_work():
            assert not engine.step()
        assert all(row.status is Status.FINISHED for row in request.rows)
        engine.scheduler.check_integrity()
        assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_pages


@pytest.mark.parametrize(
    ("settings", "sampling", "words"),
    [
        ({"beam_width": 16, "stop_token_ids": (1, 3, 5, 7)}, {}, "at most 15"),
        ({"beam_width": 2, "stop_token_ids": tuple(range(9, 40))}, {}, "fewer than 20 tokens.*32"),
        ({"beam_width": 9}, {}, "--max-num-seqs"),
        ({"beam_width": 8, "max_tokens": 50}, {}, "KV pages for 8 x 53 tokens"),
        ({"beam_width": 2}, {"presence_penalty": 1.0}, "not support penalties"),
        ({"beam_width": 2}, {"logit_bias": ((3, 1.0),)}, "not support logit_bias"),
        ({"beam_width": 2}, {"allowed_token_ids": (3,)}, "not support allowed_token_ids"),
    ],
)
def test_unsupported_beam_searches_are_refused(tiny_model, settings, sampling, words):
    config = EngineConfig(
        model=str(tiny_model("llama")),
        device="cpu",
        max_model_len=64,
        block_size=8,
        max_num_seqs=8,
        num_gpu_blocks_override=40,
        admission="fits",
    )
    engine = Engine(config)
    params = BeamSearchParams(**settings)
    with pytest.raises(InputError, match=words):
        engine.add_request(
            "0",
            [5, 6, 7],
            SamplingParams(max_tokens=params.max_tokens, **sampling),
            options=RequestOptions(beam_search=params),
        )
    assert not engine.has_work()


@pytest.mark.parametrize(
    "fields",
    [{"beam_width": 0}, {"beam_width": 17}, {"beam_width": 2, "n": 3}]
    + [{"beam_width": 2, "early_stopping": "later"}, {"beam_width": 2, "length_penalty": 1e9}]
    + [{"beam_width": "2"}, {"beam_width": 2, "length_penalty": "x"}],
)
def test_out_of_range_parameters_are_refused(fields):
    with pytest.raises(InputError, match="expected"):
        BeamSearchParams(**fields)


def test_beam_search_with_speculation_is_refused(tiny_model):
    settings = '{"method": "ngram", "num_speculative_tokens": 2}'
    config = EngineConfig(
        model=str(tiny_model("llama")),
        device="cpu",
        max_model_len=64,
        cpu_kv_cache_memory=0.01,
        speculative_config=settings,
    )
    engine = Engine(config)
    params = BeamSearchParams(beam_width=2)
    with pytest.raises(InputError, match="not supported with speculative decoding"):
        engine.add_request(
            "0",
            [5, 6, 7],
            sampling_params(params),
            options=RequestOptions(beam_search=params),
        )
