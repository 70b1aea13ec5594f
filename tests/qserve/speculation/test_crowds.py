"""Random crowds on random engines: several outputs of a prompt, aborts at any moment, short limits,
texts up to the model's end, prompts' log probabilities, a cache that is emptied meanwhile.

Each draws its drafter, its engine's settings and its requests from a seed.
"""

import json
import random
from dataclasses import replace

import pytest

from qserve.params.request_options import RequestOptions
from qserve.speculation import drafter as drafters
from tests.qserve.speculation.docs_heads import CONFIGS, write_docs_head
from tests.qserve.speculation.drafters import ERRING, Oracle
from tests.qserve.speculation.traces import KINDS, make_engine, make_params

MAX_STEPS = 4000
ENGINES = (
    {},
    {"num_gpu_blocks_override": 34, "admission": "fits"},
    {"scheduling_policy": "priority", "num_gpu_blocks_override": 40, "admission": "fits"},
    {"scheduling_policy": "prefill-first", "num_gpu_blocks_override": 34, "admission": "fits"},
    {"scheduling_policy": "longest-prefix"},
    {"enable_prefix_caching": False, "max_num_batched_tokens": 11},
    {"kv_offload_gb": 0.001, "num_gpu_blocks_override": 34, "admission": "fits"},
    {"block_size": 1, "num_gpu_blocks_override": 140},
    {"block_size": 16, "num_gpu_blocks_override": 12, "admission": "fits"},
    {"max_num_seqs": 2},
    {"max_num_batched_tokens": 6},
    {"target_itl_ms": 5.0},
)
DRAFTERS = ("oracle", "ngram", "suffix", "erring", "eagle3", "dflash", "peagle")


def make_crowd(rng, count):
    """(name, prompt, params, client, group) of each; some are outputs of one prompt."""
    shared = [[rng.randrange(300, 900) for _ in range(length)] for length in (9, 24, 60)]
    found = []
    while len(found) < count:
        kind = rng.choice(list(KINDS))
        params, different = make_params(kind, rng), {}
        prompt = [rng.randrange(300, 900) for _ in range(rng.choice([1, 3, 8, 17, 40, 80]))]
        if rng.random() < 0.5:
            prompt = rng.choice(shared) + prompt[: rng.choice([0, 1, 6])]
        if not params.bad_words:  # whose token ids replace() would lose
            limit = rng.random()
            if limit < 0.2 and not params.min_tokens:
                different["max_tokens"] = rng.choice([1, 2, 3])
            elif limit < 0.35 and kind in ("greedy", "sampled", "frequency", "penalties"):
                different["max_tokens"] = None  # to the model's end
            if rng.random() < 0.15 and not kind.startswith("form"):
                different["prompt_logprobs"] = rng.choice([0, 2])
        for index in range(1 if params.bad_words else rng.choice([1, 1, 1, 3])):
            own = replace(params, **different, seed=params.seed + index) if different else params
            name, client = f"{kind} {len(found)}", rng.choice("ab")
            found.append((name, prompt, own, client, f"group {len(found) - index}"))
    return found


def run(engine, crowd, seed, aborts=()):
    """name -> (tokens, its end, log probabilities of tokens, of the prompt).

    `aborts`: after so many tokens, -1 before its first step.
    """
    rng, waiting, left, found = random.Random(seed), list(crowd), dict(aborts), {}
    for _ in range(MAX_STEPS):
        if not (waiting or engine.has_work()):
            break
        for _ in range(min(len(waiting), rng.choice([0, 1, 1, 4]))):
            name, prompt, params, client, group = waiting.pop(0)
            options = RequestOptions(priority=len(name) % 3)
            engine.add_request(name, prompt, params, client=client, group=group, options=options)
            found[name] = [], None, [], None
            if left.get(name) == -1:
                engine.abort(name)
                del left[name]
        if rng.random() < 0.02:
            engine.scheduler.reset_prefix_cache()
        for event in engine.step():
            tokens, _, logprobs, of_prompt = found[event.request_id]
            assert len(event.logprobs) in (0, len(event.token_ids))
            assert event.finish_reason != "error" or "no token" in event.error, event.error
            tokens += event.token_ids
            logprobs += event.logprobs
            end = event.finish_reason, event.stop_token, event.error, event.ended_by_token
            if event.prompt_logprobs is not None:
                of_prompt = event.prompt_logprobs
            found[event.request_id] = tokens, end, logprobs, of_prompt
            if event.finish_reason is not None:
                left.pop(event.request_id, None)
        for name, after in list(left.items()):
            if name in found and len(found[name][0]) >= after:
                engine.abort(name)
                del left[name]
        engine.scheduler.check_integrity()
    else:
        raise AssertionError("the engine comes to no end")
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_pages
    return found


def assert_same(name, got, want):
    """Tokens and ends are the same; numbers are, but for what rounding makes of other shapes."""
    assert got[:2] == want[:2], name
    assert (got[3] is None) == (want[3] is None), name
    for one, other in zip((*got[2], *(got[3] or ())), (*want[2], *(want[3] or ())), strict=True):
        if one is None or other is None:
            assert one is other
            continue
        assert one.top_tokens == other.top_tokens, name
        assert one.logprob == pytest.approx(other.logprob, abs=2e-3), name


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "seed",
    [seed if seed == 3 else pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(16)],
)
def test_many_requests_have_same_texts_as_without_drafts(docs_5m, monkeypatch, seed, tmp_path):
    rng = random.Random(seed)
    kind, settings = DRAFTERS[seed % len(DRAFTERS)], ENGINES[seed % len(ENGINES)]
    crowd = make_crowd(rng, 10)
    want = run(make_engine(docs_5m), crowd, seed)
    config = {"num_speculative_tokens": rng.choice([1, 2, 3, 5, 7])}
    config |= rng.choice([{}, {"adaptive": False}])
    if rng.random() < 0.3:
        config["num_speculative_tokens_per_batch_size"] = [[1, 2, 5], [3, 4, 0], [5, 99, 1]]
    if kind in ("oracle", "ngram", "suffix"):
        config["method"] = "ngram" if kind == "oracle" else kind
    if kind == "ngram":
        config |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    if kind == "oracle":
        answers = {name: prompt + want[name][0] for name, prompt, *_ in crowd}
        monkeypatch.setattr(
            "qserve.speculation.speculation.build_host_drafter",
            lambda config: Oracle(answers, 1, 1000),
        )
    if kind == "erring":
        config |= {"method": "draft_model", "model": str(docs_5m)}
        monkeypatch.setitem(drafters.DEVICE_DRAFTERS, "draft_model", ERRING)
    if kind == "eagle3":
        config["model"] = str(docs_5m.parent / "docs-5m-eagle3")
    if kind in CONFIGS:
        config["model"] = str(write_docs_head(tmp_path, kind))
    engine = make_engine(
        docs_5m, rng.randint(0, 1), speculative_config=json.dumps(config), **settings
    )
    aborts = {each[0]: rng.choice([-1, 0, 1, 2, 5]) for each in crowd if rng.random() < 0.15}
    found = run(engine, crowd, seed + 1, aborts)
    for name in want:
        if name in aborts and (found[name][1] or (None,))[0] is None:
            tokens = found[name][0]
            assert tokens == want[name][0][: len(tokens)], name
        else:
            assert_same(name, found[name], want[name])
