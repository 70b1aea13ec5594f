"""A soak: hours of random requests in compressed time. Nothing is lost, wrong, or leaked."""

import gc
import random
import sys
from itertools import pairwise

import pytest

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.engine import Engine
from qserve.params.request_options import RequestOptions
from qserve.params.sampling_params import ParameterError, SamplingParams
from tests.qserve.engine.hash_model import HashDevice, continuation

STEP_SECONDS = 0.02
PAGE, PAGES = 4, 90
# settings that matter to who is computed when, and where keys are
MODES = {
    "fcfs": {},
    "one at a time": {"max_num_seqs": 1, "max_num_batched_tokens": 7},
    "host": {"kv_offload_gb": 0.002},
    "no cache": {"enable_prefix_caching": False},
    "priority": {"scheduling_policy": "priority"},
    "prefill first": {"scheduling_policy": "prefill-first"},
    "longest prefix": {"scheduling_policy": "longest-prefix", "kv_offload_gb": 0.002},
    "controlled": {"scheduling_policy": "controlled", "prefill_batch_size": 3},
    "paced": {"target_itl_ms": 5.0},
}


class Soak:
    """Clients of an engine, and what each of them got."""

    def __init__(self, folder, seed, **settings):
        self.now, self.rng = 0.0, random.Random(seed)
        settings = {"max_num_seqs": 8, "max_num_batched_tokens": 48} | settings
        self.engine = Engine(
            EngineConfig(
                model=str(folder),
                device="cpu",
                block_size=PAGE,
                num_gpu_blocks_override=PAGES,
                max_model_len=200,
                **settings,
            ),
            steps_in_flight=seed % 2,
            clock=lambda: self.now,
        )
        host = self.engine.scheduler.pool.host
        self.vocab_size = self.engine.vocab_size
        num_slots = 0 if host is None else host.num_slots
        self.device = HashDevice(PAGES, PAGE, num_slots, self.vocab_size)
        self.engine._in_flight.workers = self.device
        self.systems = [self.tokens(length) for length in (9, 30, 64, 64)]
        self.chats = []  # conversations so far
        self.open = {}  # name -> (prompt, params)
        self.outputs = {}
        self.outcomes = {}
        self.num_cached = self.number = 0

    def tokens(self, count):
        return [self.rng.randrange(3, self.vocab_size) for _ in range(count)]

    def prompt(self):
        rng = self.rng
        kind = rng.random()
        if kind < 0.05:
            return rng.choice([[], self.tokens(500), [5, self.vocab_size], [-1]])
        if kind < 0.4 and self.chats:
            return rng.choice(self.chats)[-150:] + self.tokens(rng.randint(1, 5))
        start = rng.choice(self.systems) if kind < 0.8 else []
        return start + self.tokens(min(100, int(rng.paretovariate(1.2) * 3)))

    def arrive(self):
        """One API request, of one output or several; it may be refused."""
        rng, prompt = self.rng, self.prompt()
        self.number += 1
        salt, client = rng.choice(["", "", "", "s"]), rng.choice(["a", "a", "b", "c"])
        for index in range(rng.choice([1, 1, 1, 3])):
            name = f"{self.number}-{index}"
            try:
                params = SamplingParams(
                    max_tokens=min(80, int(rng.paretovariate(1.1) * 4)),
                    temperature=0,
                    ignore_eos=True,
                    min_tokens=rng.choice([0, 0, 0, 90]),
                    stop_token_ids=self.tokens(rng.choice([0, 0, 500])),
                )
                options = RequestOptions(
                    priority=rng.choice([0, 0, 1, 5]),
                    cache_salt=salt,
                    timeout=rng.choice([None, None, None, 0.5, 8.0]),
                )
                self.engine.add_request(
                    name,
                    prompt,
                    params,
                    client=client,
                    group=str(self.number),
                    options=options,
                )
            except (InputError, ParameterError) as error:
                self.outcomes[name] = f"refused: {error}"
            else:
                self.open[name], self.outputs[name] = (prompt, params), []

    def step(self):
        for event in self.engine.step():
            self.outputs[event.request_id] += event.token_ids
            if event.finish_reason is not None:
                self.end(event)
        if self.open and self.rng.random() < 0.01:
            name = self.rng.choice(list(self.open))
            self.engine.abort(name)
            self.check(name)
            self.outcomes[name] = "aborted"
        self.now += STEP_SECONDS

    def end(self, event):
        name = event.request_id
        self.num_cached += event.facts.num_cached
        prompt, params = self.open[name]
        output = self.check(name)
        reason = event.finish_reason
        assert reason in ("length", "stop") or "deadline exceeded" in event.error
        assert (reason == "stop") == (bool(output) and output[-1] in params.stop_token_ids)
        assert reason != "length" or len(output) == min(params.max_tokens, 200 - len(prompt))
        self.outcomes[name] = reason
        self.chats = [*self.chats[-20:], [*prompt, *output]]

    def check(self, name):
        """The output equals the model's, however it was computed."""
        (prompt, _), output = self.open.pop(name), self.outputs.pop(name)
        assert output == continuation(prompt, len(output), self.vocab_size)
        return output

    def run(self, seconds):
        """Arrivals come in bursts, at times more than can be served."""
        end, calm = self.now + seconds, True
        while self.now < end:
            if self.rng.random() < 0.01:
                calm = not calm
            if self.rng.random() < (0.03 if calm else 0.15):
                self.arrive()
            self.step()
        while self.engine.has_work():
            self.step()
        self.engine.scheduler.check_integrity()
        assert not self.open and not self.outputs and not self.engine._requests
        assert self.engine.scheduler.pool.num_free == PAGES
        assert len(self.engine.scheduler.waiting) == 0


def blocks_in_use(soak):
    """Python's memory, without the data that the test itself keeps."""
    soak.outcomes.clear()
    soak.chats.clear()
    gc.collect()
    return sys.getallocatedblocks()


@pytest.mark.parametrize("mode", MODES)
def test_soak_half_a_minute(mode, docs_5m):
    soak = Soak(docs_5m, seed=sorted(MODES).index(mode), **MODES[mode])
    soak.run(30)
    kinds = {outcome.partition(":")[0] for outcome in soak.outcomes.values()}
    assert {"length", "refused", "aborted"} <= kinds, "or it tests less than it says"
    assert len(soak.outcomes) >= soak.number > 50
    assert (soak.num_cached > 0) == (mode != "no cache")
    host = soak.engine.scheduler.pool.host
    assert host is None or host.num_loaded > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["fcfs", "host", "priority"])
def test_soak_quarter_of_an_hour_memory_is_flat(mode, docs_5m):
    """Memory is flat. Threads of other tests may allocate meanwhile, but a leak shows each time."""
    soak = Soak(docs_5m, seed=11 + sorted(MODES).index(mode), **MODES[mode])
    counts = []
    for _ in range(4):
        soak.run(225)
        counts.append(blocks_in_use(soak))
    growth = [after - before for before, after in pairwise(counts)]
    assert min(growth) < soak.number / 8, f"a leak of half a block for each request: {growth}"
