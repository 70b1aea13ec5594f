"""Draws engines and crowds of requests in which features meet, and runs them. Asserts no texts.

A draw is plain data, made of a seed alone: who finds a failure can take parts away until what is
left is small.
"""

import json
import random
from dataclasses import dataclass, field
from typing import Any

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.engine import Engine
from qserve.errors import ParameterError
from qserve.library.beam_outputs import sampling_params as of_search
from qserve.lora.request import LoRARequest
from qserve.params.beam_search_params import BeamSearchParams
from qserve.params.request_options import RequestOptions
from qserve.params.sampling_params import SamplingParams
from qserve.pooling.params import PoolingParams

MAX_LEN = 72
MAX_STEPS = 6000  # against hanging; an engine that waits for threads takes up to 10 ms each
STEP_SECONDS = 0.02
NUM_ADAPTERS = 3
MAX_OUTPUTS = 4

FORMS = (
    {"regex": "(yes|no|maybe) [0-9]{2,5}( and [a-z ]{3,20})?"},
    {"regex": "[a-z]{1,8}"},
    {"choice": ["alpha", "beta", "alphabet"]},
    {"json_object": True},
    {"grammar": 'start: "a" b+ "c"\nb: /[xyz]{1,3}/'},
)
POOLINGS = (
    {"kind": "last"},
    {"kind": "cls"},
    {"kind": "mean", "normalize": True},
    {"kind": "all", "dimensions": 7},
    {"kind": "tokens", "token_ids": (5, 9, 30)},
)
POLICIES = ("priority", "prefill-first", "longest-prefix", "controlled")
DRAFTERS = (
    {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    {"method": "suffix"},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnRequest:
    """One request, and the step before which it is added."""

    name: str
    step: int
    prompt: list[int]
    params: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # its adapter as a number
    client: str = ""
    group: str = ""

    def sampling(self) -> SamplingParams:
        if search := self.options.get("beam_search"):
            return of_search(BeamSearchParams(**search))
        return SamplingParams(**self.params)

    def handled(self, adapters: list[str], *, alone: bool = False) -> RequestOptions:
        """`alone`: without what only matters to others."""
        fields = dict(self.options)
        if "beam_search" in fields:
            fields["beam_search"] = BeamSearchParams(**fields["beam_search"])
        if "pooling" in fields:
            fields["pooling"] = PoolingParams(**fields["pooling"])
        if "lora" in fields:
            number = fields["lora"]
            fields["lora"] = LoRARequest(f"a{number}", number + 1, adapters[number])
        for name in ("timeout", "cache_salt", "priority") if alone else ():
            fields.pop(name, None)
        return RequestOptions(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    settings: dict[str, Any]
    steps_in_flight: int
    requests: list[DrawnRequest]
    aborts: list[tuple[int, str]]  # before which step whom
    resets: list[int]  # before which steps the prefix cache is emptied
    changes: list[tuple[int, int, bool]]  # before which step which adapter is loaded again, or not


@dataclass(slots=True, kw_only=True)
class RequestResult:
    """Events that a request received."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    prompt_logprobs: tuple | None = None
    end: tuple | None = None
    pooled: bytes = b""
    beams: tuple = ()
    num_cached: int = 0

    def take(self, event) -> None:
        assert self.end is None, f"an event after its end: {event}"
        assert len(event.logprobs) in (0, len(event.token_ids))
        self.tokens += event.token_ids
        self.logprobs += event.logprobs
        self.num_cached = event.facts.num_cached
        if event.prompt_logprobs is not None:
            assert self.prompt_logprobs is None
            self.prompt_logprobs = event.prompt_logprobs
        if event.finish_reason is not None:
            ended = event.finish_reason, event.stop_token, event.error, event.ended_by_token
            self.end, self.pooled, self.beams = ended, event.pooled, event.beams


def draw(seed: int, *, vocab_size: int, drafters=DRAFTERS, has_forms=True, has_adapters=True):
    """`drafters` empty: no speculation. `has_forms`: the model has a tokenizer."""
    rng = random.Random(seed)
    settings = _settings(rng, drafters, has_adapters)
    if seed % 4:
        settings["admission"] = "fits"  # so that requests are preempted
    shared = [[rng.randrange(3, vocab_size) for _ in range(length)] for length in (9, 17, 40)]
    requests, step = [], 0
    for number in range(rng.choice([4, 7, 10])):
        step += rng.choice([0, 0, 1, 3, 10])
        requests += _api_request(rng, number, step, shared, vocab_size, has_forms, settings)
    changes = [(rng.randrange(40), rng.randrange(NUM_ADAPTERS), rng.random() < 0.5)]
    return Draw(
        settings=settings,
        steps_in_flight=rng.randint(0, 1),
        requests=requests,
        aborts=sorted(
            (each.step + rng.choice([0, 0, 1, 2, 5, 12, 30]), each.name)
            for each in requests
            if rng.random() < 0.12
        ),
        resets=sorted(rng.randrange(40) for _ in range(rng.choice([0, 0, 1, 3]))),
        changes=sorted(changes * rng.choice([0, 1])) if "enable_lora" in settings else [],
    )


def _settings(rng, drafters, has_adapters) -> dict[str, Any]:
    page, seqs = rng.choice([1, 2, 4, 4, 8, 16]), rng.choice([1, 2, 3, 6, 12])
    longest = -(-MAX_LEN // page)
    found = {
        "block_size": page,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": max(seqs, rng.choice([3, 6, 11, 24, 40, 1024])),
        "num_gpu_blocks_override": rng.choice([longest, longest + 2, 2 * longest, 6 * longest]),
    }
    has_cache = rng.random() < 0.8
    maybe = {
        "enable_prefix_caching": (not has_cache, False),
        "kv_offload_gb": (rng.random() < 0.25, rng.choice([0.0005, 0.002])),
        "kv_transfer_config": (has_cache and rng.random() < 0.2, "kv_both"),
        "scheduling_policy": (rng.random() < 0.4, rng.choice(POLICIES)),
        "prefill_batch_size": (rng.random() < 0.2, 2),
        "target_itl_ms": (rng.random() < 0.1, 0.5),
        "enable_lora": (has_adapters and rng.random() < 0.3, True),
        "max_loras": (True, rng.choice([1, 2, 3])),
    }
    found |= {name: value for name, (is_given, value) in maybe.items() if is_given}
    if drafters and rng.random() < 0.35:
        config = rng.choice(drafters) | {"num_speculative_tokens": rng.choice([1, 2, 5])}
        found["speculative_config"] = json.dumps(config | {"adaptive": rng.random() < 0.6})
    return found


def _api_request(rng, number, step, shared, vocab_size, has_forms, settings) -> list[DrawnRequest]:
    """All outputs of one: they have a group."""
    options = {}
    if rng.random() < 0.15:
        options["cache_salt"] = rng.choice("ab")
    if settings.get("scheduling_policy") == "priority":
        options["priority"] = rng.choice([-1, 0, 3])
    if rng.random() < 0.06:
        options["timeout"] = rng.choice([0.001, 0.2, 1.0])
    if "enable_lora" in settings and rng.random() < 0.6:
        options["lora"] = rng.randrange(NUM_ADAPTERS)
    prompt = _prompt(rng, shared, vocab_size)
    same = {"step": step, "prompt": prompt, "client": rng.choice("ab"), "group": str(number)}
    kind = rng.random()
    if kind < 0.1:
        options["pooling"] = rng.choice(POOLINGS)
        return [DrawnRequest(name=str(number), options=options, **same)]
    if kind < 0.2 and "speculative_config" not in settings:
        options["beam_search"] = {
            "beam_width": rng.choice([1, 2, 3, 4]),
            "max_tokens": rng.choice([1, 4, 9, None]),
            "length_penalty": rng.choice([1.0, 0.0, 2.0, -1.0]),
            "early_stopping": rng.choice([False, True, "never"]),
            "stop_token_ids": rng.sample(range(vocab_size), rng.choice([0, 1, 3])),
            "logprobs": rng.choice([None, 2]),
        }
        return [DrawnRequest(name=str(number), options=options, **same)]
    params = _params(rng, vocab_size, has_forms)
    seed = params.pop("seed")
    return [
        DrawnRequest(
            name=f"{number}-{index}",
            params={**params, "seed": seed + index},
            options=options,
            **same,
        )
        for index in range(rng.choice([1, 1, 2, MAX_OUTPUTS]))
    ]


def _prompt(rng, shared, vocab_size) -> list[int]:
    own = [rng.randrange(3, vocab_size) for _ in range(rng.choice([1, 2, 8, 9, 16, 17, 33, 48]))]
    kind = rng.random()
    if kind < 0.45:
        own = rng.choice(shared) + own[: rng.choice([0, 1, 6, 20])]
    elif kind < 0.55:
        own = shared[-1][: rng.randint(1, 40)]
    elif kind < 0.7:  # what ngram and suffix find again
        own = (own[: rng.randint(1, 9)] * 30)[:40]
    return own[: MAX_LEN - rng.choice([1, 12, 12, 12])]


def _params(rng, vocab_size, has_forms) -> dict[str, Any]:
    def some(count):
        return rng.sample(range(vocab_size), count)

    limit = rng.choice([1, 2, 3, 5, 9, 13, 20, None])
    found = {"max_tokens": limit, "ignore_eos": rng.random() < 0.5, "temperature": 0.0}
    found["seed"] = rng.choice([0, 77, -5])
    if rng.random() < 0.6:
        found["temperature"] = rng.choice([0.3, 0.7, 1.0, 2.0])
    maybe = {
        "top_p": (0.2, rng.choice([0.5, 0.9])),
        "top_k": (0.2, rng.choice([1, 5, 50])),
        "min_p": (0.1, rng.choice([0.01, 1.0])),
        "presence_penalty": (0.2, rng.choice([-1.0, 2.0])),
        "frequency_penalty": (0.2, rng.choice([-0.5, 0.8])),
        "repetition_penalty": (0.2, rng.choice([0.8, 1.3])),
        "logit_bias": (0.2, {rng.randrange(vocab_size): 5.0, 2: rng.choice([3.0, 30.0])}),
        "logprobs": (0.35, rng.choice([0, 1, 3, 20])),
        "prompt_logprobs": (0.12, rng.choice([0, 2])),
        "stop_token_ids": (0.25, some(rng.choice([1, vocab_size // 160, vocab_size // 16]))),
        "min_tokens": (0.25, rng.randint(0, min(12, limit or 12))),
        "allowed_token_ids": (0.12, [*some(rng.choice([1, 3, 60])), 2]),
        "structured_outputs": (0.2 * has_forms, rng.choice(FORMS)),
    }
    found |= {name: value for name, (share, value) in maybe.items() if rng.random() < share}
    if rng.random() < 0.15:
        pool = found.get("allowed_token_ids") or range(vocab_size)
        sequences = [[rng.choice(pool) for _ in range(rng.choice([1, 2, 3]))] for _ in range(20)]
        found |= {"bad_words": ["x"], "bad_words_token_ids": sequences}
    return found


def make_engine(folder, settings, steps_in_flight, path, clock) -> Engine:
    settings = dict(settings)
    if role := settings.get("kv_transfer_config"):
        config = {"kv_connector": "folder", "kv_role": role}
        config["kv_connector_extra_config"] = {"path": str(path)}
        settings["kv_transfer_config"] = json.dumps(config)
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", max_model_len=MAX_LEN, **settings
    )
    return Engine(config, steps_in_flight=steps_in_flight, clock=clock)


def run(
    drawn: Draw, folder, path, adapters=()
) -> tuple[dict[str, RequestResult], set[str], list[str]]:
    """Return the events of each request, the aborted requests, and the reasons of refusals.

    Checks the engine after each step, and that it holds nothing at the end.
    """
    steps = 0
    engine = make_engine(
        folder, drawn.settings, drawn.steps_in_flight, path, lambda: steps * STEP_SECONDS
    )
    found, aborted, refused = {}, set(), []
    waiting = list(drawn.requests)
    while waiting or engine.has_work():
        assert steps < MAX_STEPS, f"it comes to no end: {engine.report()}"
        while waiting and (waiting[0].step <= steps or not engine.has_work()):
            each = waiting.pop(0)
            whose = {"client": each.client, "group": each.group}
            whose |= {"options": each.handled(adapters), "arrived": steps * STEP_SECONDS}
            try:
                engine.add_request(each.name, each.prompt, each.sampling(), **whose)
            except (InputError, ParameterError) as error:
                refused.append(str(error))
            else:
                found[each.name] = RequestResult()
        for _, name in [each for each in drawn.aborts if each[0] == steps]:
            if name in found and found[name].end is None:
                engine.abort(name)
                aborted.add(name)
        for _ in range(drawn.resets.count(steps)):
            engine.reset_prefix_cache()
        for _, number, is_removed in [each for each in drawn.changes if each[0] == steps]:
            engine.adapters.remove(f"a{number}")
            if not is_removed:
                folder = adapters[number]
                engine.adapters.put(f"a{number}", folder, engine.adapters.read(folder))
        for event in engine.step():
            assert event.request_id not in aborted
            found[event.request_id].take(event)
        engine.scheduler.check_integrity()
        steps += 1
    pool, report = engine.scheduler.pool, engine.report()
    assert pool.num_free == pool.num_pages and not engine._requests
    assert not (engine._masks._requests or engine._in_flight._reporting)
    assert not (report.num_running or report.num_waiting or report.running_adapters)
    assert not report.waiting_adapters
    assert all(each.end is not None for name, each in found.items() if name not in aborted)
    return found, aborted, refused


class Alone:
    """The simplest engine: one request at a time, whole, with nothing kept of the ones before."""

    def __init__(self, folder, *, has_adapters: bool) -> None:
        settings = {"block_size": 16, "max_num_seqs": MAX_OUTPUTS, "num_gpu_blocks_override": 64}
        settings |= {"enable_prefix_caching": False, "max_num_batched_tokens": 1024}
        if has_adapters:
            settings |= {"enable_lora": True, "max_loras": NUM_ADAPTERS}
        self._engine = make_engine(folder, settings, 0, "", lambda: 0.0)

    def answer(self, asked: DrawnRequest, adapters=()) -> RequestResult:
        got = RequestResult()
        options = asked.handled(adapters, alone=True)
        self._engine.add_request(asked.name, asked.prompt, asked.sampling(), options=options)
        for _ in range(MAX_STEPS):
            if not self._engine.has_work():
                return got
            for event in self._engine.step():
                got.take(event)
        raise AssertionError("it comes to no end")
