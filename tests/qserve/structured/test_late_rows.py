"""A grammar whose masks are slow: the others' steps go on, and its own text stays the same."""

import threading
from itertools import pairwise

import pytest

from qserve import SamplingParams
from qserve.config import EngineConfig
from qserve.engine.engine import Engine
from qserve.engine.step import mask_jobs
from qserve.structured.constraint import Constraint

SLOW = {
    "structured_outputs": {"regex": "([a-d]{2} ){6}[0-9]{2}"},
    "presence_penalty": 1.0,  # counts what the device draws, so a dropped token would show
    "repetition_penalty": 1.3,
    "temperature": 1.0,
    "seed": 5,
    "max_tokens": 40,
    "logprobs": 1,
}
FREE = {"temperature": 1.0, "seed": 6, "max_tokens": 60, "ignore_eos": True}
OTHER = {"structured_outputs": {"regex": "[a-z ]{400}"}, "seed": 7, "max_tokens": 60}
NGRAM = '{"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}'
MODES = {
    "waits": {"depth": 0},
    "ahead": {"depth": 1},
    "masks go along with the launch": {"depth": 1, "waits": True},
    "drafts": {"depth": 1, "speculative_config": NGRAM},
}


def some(*names):
    """These modes, and the others where there is time."""
    more = [pytest.param(name, marks=pytest.mark.exhaustive) for name in MODES if name not in names]
    return pytest.mark.parametrize("mode", [*names, *more])


def make(docs_5m, depth=1, waits=False, **settings):
    settings = {"max_model_len": 128, "num_gpu_blocks_override": 64} | settings
    engine = Engine(EngineConfig(model=str(docs_5m), **settings), steps_in_flight=depth)
    engine._masks.waits |= waits  # as an engine of several ranks does
    return engine


class Run:
    """An engine with some requests, and what they have got so far."""

    def __init__(self, engine, **requests):
        self.engine, self.tokens, self.logprobs, self.ends = engine, {}, {}, {}
        for number, (name, fields) in enumerate(requests.items()):
            params = SamplingParams(**{"temperature": 1.0} | fields)
            engine.add_request(name, [7, 8, 9] * (3 + number), params)

    def step(self):
        for event in self.engine.step():
            name = event.request_id
            self.tokens.setdefault(name, []).extend(event.token_ids)
            self.logprobs.setdefault(name, []).extend(each.logprob for each in event.logprobs)
            if event.finish_reason:
                self.ends[name] = (event.finish_reason, event.error)
        self.engine.scheduler.check_integrity()

    def run_out(self, on_step=lambda: None):
        while self.engine.has_work():
            on_step()
            self.step()
        return self.tokens, self.ends

    def count(self, name):
        return len(self.tokens.get(name, ()))


class Gate:
    """Holds up masks of the request "slow", before its output tokens `at`, until it is opened."""

    def __init__(self, monkeypatch, engine, at=None, of_drafts=False):
        self.opened, self.entered = threading.Event(), threading.Event()
        self._engine, self._at, self._of_drafts = engine, at, of_drafts
        mask = Constraint.mask

        def held(constraint, ends, may_end):
            if self._holds(constraint):
                self.entered.set()
                assert self.opened.wait(60), "nobody opened it"
            return mask(constraint, ends, may_end)

        monkeypatch.setattr(Constraint, "mask", held)

    def _holds(self, constraint):
        request = self._engine._requests.get("slow")
        if request is None or (request.constraint is constraint) == self._of_drafts:
            return False
        return self._at is None or request.num_known - request.num_prompt_tokens == self._at


@pytest.fixture
def gate(monkeypatch):
    made = []

    def make_gate(engine, **fields):
        made.append(Gate(monkeypatch, engine, **fields))
        return made[-1]

    yield make_gate
    for each in made:
        each.opened.set()


def undisturbed(docs_5m, monkeypatch, mode, **requests):
    with monkeypatch.context() as patch:
        patch.setattr(mask_jobs, "PATIENCE_SECONDS", 60.0)
        return Run(make(docs_5m, **mode), **requests).run_out()


@pytest.mark.exhaustive
@pytest.mark.parametrize("at", [3, pytest.param(0, marks=pytest.mark.exhaustive)])
@some("ahead", "drafts")
def test_other_rows_run_while_mask_is_pending(docs_5m, monkeypatch, gate, mode, at):
    """Neighbours with and without a grammar get a token a step while the mask does not come."""
    long = {"max_tokens": 200}  # on a busy machine many steps pass before the mask is asked for
    requests = {"slow": SLOW, "free": FREE | long, "other": OTHER | long}
    settings = MODES[mode] | {"max_model_len": 256}
    want = undisturbed(docs_5m, monkeypatch, settings, **requests)
    run = Run(engine := make(docs_5m, **settings), **requests)
    held = gate(engine, at=at)
    while not held.entered.is_set() or run.count("slow") < at:
        run.step()
    for _ in range(3):  # what was in flight
        run.step()
    monkeypatch.setattr(mask_jobs, "PATIENCE_SECONDS", 60.0)  # of masks that are not held
    computed, free, other = [], run.count("free"), run.count("other")
    for _ in range(20):
        run.step()
        plans = [flight.plan for flight in engine._in_flight]
        computed += [chunk.request.request_id for plan in plans for chunk in plan.chunks]
    assert run.count("slow") == at and "slow" not in run.ends
    assert "slow" not in computed, "nothing is computed for it in vain"
    table = engine.runner.sampler.history.table  # None before the first token that is counted
    counts_V = [] if table is None else table[engine._requests["slow"].row]
    assert sum(int(count) // 2 for count in counts_V) == at, "what was dropped is not counted"
    # Where masks go along with the launch a row is in every other step, late masks or not. With
    # drafts from tokens of the host all are.
    of_other = 10 if engine._masks.waits and engine._max_in_flight else 20
    of_free = of_other if mode == "drafts" else 20
    assert run.count("free") >= free + of_free and run.count("other") >= other + of_other - 1
    held.opened.set()
    assert run.run_out() == want
    assert len(run.logprobs["slow"]) == len(run.tokens["slow"])


@pytest.mark.exhaustive
@some("ahead")
def test_row_waits_once_per_token_for_late_mask(docs_5m, monkeypatch, gate, mode):
    """Each mask comes two steps late; the row still ends, in so many steps for each token."""
    monkeypatch.setattr(mask_jobs, "PATIENCE_SECONDS", 0.0)
    requests = {"slow": SLOW, "free": FREE | {"max_tokens": 100}}
    want = undisturbed(docs_5m, monkeypatch, MODES[mode], **requests)
    run = Run(engine := make(docs_5m, **MODES[mode]), **requests)
    held, steps, since = gate(engine), 0, 0
    while "slow" not in run.ends:
        since = since + 1 if held.entered.is_set() else 0
        if since == 3:  # this mask is released; the next one is held again
            job = engine._requests["slow"].mask_job
            held.entered.clear()
            held.opened.set()
            job.mask()
            held.opened.clear()
        run.step()
        steps += held.entered.is_set() or since > 0
    length = run.count("slow")
    assert length > 10 and steps <= 7 * length
    held.opened.set()
    assert run.run_out() == want


def test_engine_waiting_only_for_mask_stays_alive(docs_5m, gate):
    run = Run(engine := make(docs_5m), slow=SLOW)
    held = gate(engine, at=2)
    while run.count("slow") < 2:
        run.step()
    for _ in range(5):
        run.step()
        assert engine.has_work() and engine.report().num_running == 1
    assert not engine._in_flight, "no step computes what nobody takes"
    held.opened.set()
    assert run.run_out()[1] == {"slow": ("stop", "")}


@some("masks go along with the launch")
def test_request_can_be_aborted_while_mask_is_pending(docs_5m, gate, mode):
    run = Run(engine := make(docs_5m, **MODES[mode]), slow=SLOW, free=FREE)
    held = gate(engine, at=3)
    while not held.entered.is_set():
        run.step()
    engine.abort("slow")
    engine.scheduler.check_integrity()
    while engine.has_work():
        run.step()
    assert run.ends == {"free": ("length", "")}
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_pages


@pytest.mark.exhaustive
@some("drafts")
def test_request_can_be_preempted_while_mask_is_pending(docs_5m, monkeypatch, gate, mode):
    """It computes its tokens again, and may still lack the mask then."""
    few = {"num_gpu_blocks_override": 14, "admission": "fits", "block_size": 8, "max_model_len": 96}
    requests = {"free": FREE | {"max_tokens": 70}, "slow": SLOW}
    want = undisturbed(docs_5m, monkeypatch, MODES[mode] | few, **requests)
    run = Run(engine := make(docs_5m, **MODES[mode] | few), **requests)
    held = gate(engine, at=4)
    while not held.entered.is_set():
        run.step()
    slow = engine._requests["slow"]
    while "free" not in run.ends:
        if not slow.facts.num_preemptions and run.count("free") > 20:
            engine.scheduler.running_set.preempt(slow, _Step())
        run.step()
    assert slow.facts.num_preemptions
    held.opened.set()
    assert run.run_out() == want


class _Step:
    """A plan in the making, as far as it learns of a request that loses its pages."""

    def __init__(self):
        self.preempted, self.chunks = [], []


def test_verify_with_late_masks_is_shortened(docs_5m, monkeypatch, gate):
    """The masks along its drafts do not come: it gets a token a step, without further drafts."""
    mode = MODES["drafts"]
    slow = SLOW | {"structured_outputs": {"regex": "(ab cd ){12}"}, "max_tokens": 60}
    want = undisturbed(docs_5m, monkeypatch, mode, slow=slow)
    run = Run(engine := make(docs_5m, **mode), slow=slow)
    held, counts = gate(engine, of_drafts=True), [0]
    while not held.entered.is_set():
        run.step()
        counts.append(run.count("slow"))
    while counts[-1] < counts[0] + 12:
        run.step()
        counts.append(run.count("slow"))
    assert max(b - a for a, b in pairwise(counts)) == 1
    held.opened.set()
    while engine.has_work():
        run.step()
        counts.append(run.count("slow"))
    assert (run.tokens, run.ends) == want
    assert max(b - a for a, b in pairwise(counts)) > 1, "drafts come true again"


@pytest.mark.parametrize("mode", ["drafts", "ahead"])
def test_grammar_is_copied_once_for_each_verify(docs_5m, monkeypatch, mode):
    """On the engine's thread: not for steps without drafts, nor for each draft."""
    grammar = SLOW | {"structured_outputs": {"regex": "(ab cd ){12}"}, "max_tokens": 60}
    run = Run(engine := make(docs_5m, **MODES[mode]), slow=grammar, free=FREE)
    copies, verifies, copy, schedule = [], [], Constraint.copy, engine.scheduler.schedule

    def watched():
        plan = schedule()
        verifies.extend(
            chunk
            for chunk in plan.chunks
            if chunk.num_sampled > 1 and chunk.request.request_id == "slow"
        )
        return plan

    monkeypatch.setattr(engine.scheduler, "schedule", watched)
    monkeypatch.setattr(Constraint, "copy", lambda self: (copies.append(self), copy(self))[1])
    run.run_out()
    assert len(copies) == len(verifies)
    assert bool(verifies) == (mode == "drafts")
    assert max((chunk.num_sampled for chunk in verifies), default=4) > 3, "and several drafts each"


def test_mask_thread_error_is_raised(docs_5m, monkeypatch):
    """An error of the library reaches the engine, as without a thread."""

    def raises(*_):
        raise RuntimeError("the library broke")

    run = Run(make(docs_5m), slow=SLOW)
    monkeypatch.setattr(Constraint, "mask", raises)
    with pytest.raises(RuntimeError, match="the library broke"):
        run.run_out()
