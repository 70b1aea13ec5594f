"""Rows with a grammar or bad_words while a step is in flight: the text of an engine that waits."""

import pytest

from qserve import SamplingParams
from qserve.config import EngineConfig
from qserve.engine.engine import Engine
from qserve.engine.runner.model_runner import ModelRunner
from qserve.engine.step import mask_jobs
from tests.qserve.structured.schemas import CALL

REGEX = {"regex": "([a-f]{4} ){4}[0-9]{2}"}
MODES = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 8, "max_num_seqs": 8},
    "pushed out": {
        "num_gpu_blocks_override": 16,
        "admission": "fits",
        "block_size": 8,
        "max_num_seqs": 6,
    },
    "without prefix cache": {"enable_prefix_caching": False},
    "prompts first": {"scheduling_policy": "prefill-first"},
}
REQUESTS = [
    {"structured_outputs": REGEX, "temperature": 1.0},
    {"structured_outputs": {"json": CALL}, "temperature": 1.5, "logprobs": 2},
    {"structured_outputs": {"json_object": True}, "temperature": 0.0},
    {"structured_outputs": {"choice": ("red", "green apple")}},
    {"structured_outputs": REGEX, "presence_penalty": 1.5, "repetition_penalty": 1.2},
    {"structured_outputs": {"regex": "[a-z ]*"}, "min_tokens": 9, "top_k": 50},
    {"structured_outputs": REGEX, "bad_words_token_ids": [(70, 71), (72,)]},
    {"allowed_token_ids": range(20, 24), "bad_words_token_ids": [(20, 21), (21, 22)]},
    {"allowed_token_ids": range(20, 60)},
    {"temperature": 1.0, "stop_token_ids": (9, 90, 400)},
    {"structured_outputs": {"regex": "[a-c]+"}, "allowed_token_ids": (68, 69)},  # a dead end
]


def run(docs_5m, depth, **mode):
    """Return the end of each request, and the number of steps that computed something."""
    settings = {"max_model_len": 80, "cpu_kv_cache_memory": 0.1} | mode
    engine = Engine(EngineConfig(model=str(docs_5m), **settings), steps_in_flight=depth)
    for number, fields in enumerate(REQUESTS):
        params = SamplingParams(**{"temperature": 1.0, "max_tokens": 30, "seed": number} | fields)
        engine.add_request(f"r{number}", [7] * (9 + 3 * number), params)
    ends, tokens = {}, {}
    while engine.has_work():
        for event in engine.step():
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
            top_tokens = [each.top_tokens for each in event.logprobs]
            ends.setdefault(event.request_id, []).append(
                (event.finish_reason, event.error, top_tokens)
            )
        engine.scheduler.check_integrity()
    return tokens, {name: end[-1] for name, end in ends.items()}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "mode",
    [
        "pushed out",
        *(
            pytest.param(mode, marks=pytest.mark.exhaustive)
            for mode in ("plain", "chunked", "without prefix cache", "prompts first")
        ),
    ],
)
def test_text_equal_with_step_in_flight(docs_5m, mode):
    assert run(docs_5m, 1, **MODES[mode]) == run(docs_5m, 0, **MODES[mode])


@pytest.mark.exhaustive
@pytest.mark.parametrize("others", [0, 2])
def test_constrained_row_is_in_every_step(docs_5m, monkeypatch, others):
    """One forward a token, begun before the host has the token before it."""
    config = EngineConfig(model=str(docs_5m), max_model_len=80, num_gpu_blocks_override=64)
    engine = Engine(config, steps_in_flight=1)
    monkeypatch.setattr(mask_jobs, "PATIENCE_SECONDS", 60.0)  # no mask is late
    forwards, awaited = [], []
    forward, sampling = ModelRunner.launch_forward, ModelRunner.launch_sampling
    monkeypatch.setattr(
        ModelRunner,
        "launch_forward",
        lambda self, step: (forwards.append(len(known())), forward(self, step))[1],
    )
    monkeypatch.setattr(
        ModelRunner,
        "launch_sampling",
        lambda self, step: (awaited.append(len(known())), sampling(self, step))[1],
    )
    params = SamplingParams(structured_outputs=REGEX, temperature=1.0, seed=1, max_tokens=60)
    engine.add_request("r", [7] * 9, params)
    for number in range(others):
        free = SamplingParams(temperature=1.0, seed=number, max_tokens=60, ignore_eos=True)
        engine.add_request(f"free {number}", [8] * 5, free)
    request = engine._requests["r"]

    def known():
        return request.token_ids[request.num_prompt_tokens :]

    while engine.has_work() and "r" in engine._requests:
        engine.step()
    length = len(known())
    assert length > 10
    # The step for token n + 1 begins while the host knows n - 1 of them, and samples after n.
    first = max(index for index, count in enumerate(forwards) if not count) - 1
    assert forwards[first + 1 : first + length] == list(range(length - 1))
    assert awaited[first + 1 : first + length] == list(range(1, length))
