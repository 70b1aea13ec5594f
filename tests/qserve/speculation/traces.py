"""Random requests on two engines: what speculation must not change. Knows engines, no drafters."""

import random

from qserve.config import EngineConfig
from qserve.engine.engine import Engine
from qserve.params.sampling_params import SamplingParams

FORM = {"regex": "(yes|no|maybe) [0-9]{2,5}( and [a-z ]{3,20})?"}
# What each row adds to a request's settings.
KINDS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8},
    "hot": {"temperature": 1.5, "top_p": 0.9, "top_k": 50},
    "min_p": {"temperature": 1.0, "min_p": 0.05, "logprobs": 3},
    "logprobs": {"temperature": 0, "logprobs": 2},
    "frequency": {"temperature": 0.7, "frequency_penalty": 0.8},
    "penalties": {"temperature": 0, "repetition_penalty": 1.4, "presence_penalty": 0.5},
    "bias": {"temperature": 0.5, "logit_bias": {11: 3.0, 13: -100.0}},
    "min_tokens": {"temperature": 0.9, "min_tokens": 9, "stop_token_ids": list(range(0, 200, 3))},
    "stop": {"temperature": 0.9, "stop_token_ids": list(range(100, 160))},
    "allowed": {"temperature": 0.7, "allowed_token_ids": list(range(200, 290))},
    "form": {"temperature": 1.0, "structured_outputs": FORM},
    "form, penalties": {"temperature": 0, "structured_outputs": FORM, "frequency_penalty": 0.5},
}


def make_params(kind, rng):
    fields = {"seed": rng.randrange(99), "max_tokens": rng.randint(1, 24), "ignore_eos": True}
    if kind == "min_tokens":
        fields["max_tokens"] = 20
    if kind.startswith("form"):
        fields |= {"ignore_eos": False, "max_tokens": 30}
    params = SamplingParams(**fields | KINDS[kind])
    if kind == "allowed" and rng.random() < 0.5:
        bad = [[rng.randrange(200, 290) for _ in range(rng.randint(1, 2))] for _ in range(30)]
        object.__setattr__(params, "bad_words", ("x",) * len(bad))
        object.__setattr__(params, "bad_words_token_ids", tuple(map(tuple, bad)))
    return params


def make_requests(seed, num_requests, kinds=tuple(KINDS)):
    """(name, prompt, params) of each, the first of every kind."""
    rng = random.Random(seed)
    shared = [rng.randrange(300, 900) for _ in range(24)]
    found = []
    for number in range(num_requests):
        kind = kinds[number % len(kinds)]
        length = rng.choice([1, 3, 8, 17, 40])
        prompt = [rng.randrange(300, 900) for _ in range(length)]
        if rng.random() < 0.4:
            prompt = shared[: rng.randint(4, 24)] + prompt[:6]
        if rng.random() < 0.5:
            prompt = (prompt * 3)[:48]
        found.append((f"{kind} {number}", prompt, make_params(kind, rng)))
    return found


def make_engine(folder, steps_in_flight=0, **settings):
    settings = {"max_num_batched_tokens": 40, "max_num_seqs": 6, "block_size": 4} | settings
    settings = {"num_gpu_blocks_override": 120, "max_model_len": 120} | settings
    config = EngineConfig(model=str(folder), device="cpu", **settings)
    return Engine(config, steps_in_flight=steps_in_flight)


def run(engine, requests, seed=0, aborted=()):
    """Results of each request: tokens, end, log probabilities. Requests arrive in random groups."""
    rng, waiting, found = random.Random(seed), list(requests), {}
    steps = 0
    while waiting or engine.has_work():
        for _ in range(min(len(waiting), rng.choice([0, 1, 1, 4]))):
            engine.add_request(*waiting.pop(0))
        steps += 1
        assert steps < 5000
        for event in engine.step():
            tokens, tops, _ = found.get(event.request_id, ([], [], None))
            assert len(event.logprobs) in (0, len(event.token_ids))
            assert event.finish_reason != "error" or "no token" in event.error, event.error
            tops += [each.top_tokens for each in event.logprobs]
            end = event.finish_reason, event.stop_token, event.error
            found[event.request_id] = (tokens + list(event.token_ids), tops, end)
            if event.request_id in aborted and len(tokens) > 3:
                engine.abort(event.request_id)
        engine.scheduler.check_integrity()
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_pages
    return found
