"""Cost of planning and building a step in Python: calls and lines are counted, not seconds.

Lines are compared with those of another size of the same work, so that rewritten code passes.
"""

import sys
from collections import Counter
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np
import pytest

from qserve.engine.scheduling.admission import PATIENCE
from qserve.engine.scheduling.policies import POLICIES, make_policy
from qserve.engine.step import mask_jobs
from qserve.engine.step.mask_jobs import MaskJobs
from qserve.engine.step.request_rows import RequestRows
from qserve.engine.step.step_input import StepInput
from tests.qserve.engine.simulation import make_request, make_scheduler

# At 256 requests on one core of a server CPU of 2024: schedule 0.11, build 0.22, update 0.25 ms.
CALLS_OF_A_STEP = 100  # whatever the number of requests
# its chunk, its token, its event, and in one step of 16 a page more
CALLS_OF_A_REQUEST = 4
SLACK = 1.2  # a cost that does not grow, or grows with the requests alone, may grow so much


class Calls:
    """Counts calls of Python functions by name while it is entered."""

    def __init__(self):
        self.names = Counter()

    def __enter__(self):
        sys.setprofile(self.watch)
        return self

    def watch(self, frame, event, argument):
        if event == "call":
            self.names[frame.f_code.co_qualname] += 1

    def __exit__(self, *error):
        sys.setprofile(None)


class Lines:
    """Counts lines of our Python that this thread runs, by function, while it is entered."""

    def __init__(self):
        self.names = Counter()

    def __enter__(self):
        sys.settrace(self.enter)
        return self

    def enter(self, frame, event, argument):
        return self.watch if "/qserve/" in frame.f_code.co_filename else None

    def watch(self, frame, event, argument):
        if event == "line":
            self.names[frame.f_code.co_qualname] += 1
        return self.watch

    def __exit__(self, *error):
        sys.settrace(None)


class Decodes:
    """Requests that decode, each with a token in flight, and others that wait for their places."""

    def __init__(self, num_requests, policy="fcfs", num_waiting=0, **params):
        self.scheduler = make_scheduler(
            num_pages=8 * num_requests,
            page_size=16,
            max_num_seqs=num_requests,
            budget=10**6,
            policy=make_policy(policy, prefill_batch_size=num_requests),
        )
        self.requests = []
        for number in range(num_requests):
            request = make_request(
                f"r{number}", 40 + number % 16, 60, group=str(number), priority=number % 3, **params
            )
            self.requests.append(request)
            self.scheduler.add(request)
        self.rows, self.in_flight = RequestRows(num_requests), []
        for _ in range(3):
            self.step()
        for number in range(num_waiting):
            request = make_request(
                f"w{number}", 40, 60, client=f"c{number % 7}", group=f"w{number}", priority=3
            )
            self.scheduler.add(request)

    def plan(self, is_split=False):
        plan = self.scheduler.schedule()
        return plan, StepInput.build(plan, page_size=16, rows=self.rows, is_split=is_split)

    def take(self, plan):
        self.in_flight.append(plan)
        if len(self.in_flight) > 1:
            old = self.in_flight.pop(0)
            self.scheduler.update(old, [5] * sum(chunk.num_sampled for chunk in old.chunks))

    def step(self):
        plan, _ = self.plan()
        self.take(plan)
        return plan


def decode(num_requests, **params):
    """Calls of 16 steps, in which each request takes one more page."""
    decodes = Decodes(num_requests, **params)
    with Calls() as calls:
        for _ in range(16):
            assert len(decodes.step().chunks) == num_requests
    return calls.names


@pytest.mark.parametrize("num_requests", [1, 32, 256])
def test_decode_step_call_count_is_bounded(num_requests):
    names = decode(num_requests, temperature=0.7, top_p=0.9)
    names.subtract({name: count for name, count in names.items() if "genexpr" in name})
    calls = names.total() / 16
    most = CALLS_OF_A_STEP + CALLS_OF_A_REQUEST * num_requests
    assert calls <= most, names.most_common(12)


def lines_of(steps, num_requests, **params):
    """Lines of planning and building so many steps."""
    decodes = Decodes(num_requests, **params)
    with Lines() as lines:
        for _ in range(steps):
            plan, _ = decodes.plan()
            with without_lines():
                decodes.take(plan)
    return lines.names.total()


@contextmanager
def without_lines():
    watch = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(watch)


@pytest.mark.parametrize("params", [{"temperature": 0.7, "top_p": 0.9}, {"logit_bias": {5: 1.0}}])
def test_step_cost_is_linear_in_requests(params):
    few, many = (lines_of(3, count, **params) for count in (32, 256))
    assert many <= SLACK * 8 * few


@pytest.mark.parametrize("policy", POLICIES)
def test_waiting_requests_add_no_step_cost(policy):
    """Until a client with nothing gets a slot, too."""
    steps = PATIENCE + 3
    few, many = (lines_of(steps, 32, policy=policy, num_waiting=waiting) for waiting in (50, 1000))
    assert many <= SLACK * few


class Grammar:
    """A constraint that allows everything."""

    is_slow = is_complete = False
    error = ""
    words = np.full(4, -1, np.int64)

    def mask(self, ends, may_end):
        return self.words

    def take(self, token):
        pass


class ImmediateExecutor:
    """An executor whose work is done when it is submitted: nothing is waited for."""

    def submit(self, work, *arguments):
        future = Future()
        future.set_result(work(*arguments))
        return future


def lines_with_masks(num_requests):
    """(lines before the launch, lines after it) of a step with a mask for every request."""
    decodes, jobs = Decodes(num_requests), MaskJobs()
    for request in decodes.requests:
        request.constraint, request.row = Grammar(), -1
    decodes.step()
    with Lines() as before:
        plan, step = decodes.plan(is_split=True)
    assert step.awaits_masks
    with Lines() as after:
        jobs.begin(plan)
        decodes.take(plan)
        late = jobs.late(plan, lambda: False)
        step = step.with_masks(plan, decodes.rows, late)
    assert not late and len(step.sample_bias_E) == num_requests * len(Grammar.words)
    return before.names.total(), after.names.total()


def test_masks_add_no_cost_before_launch(monkeypatch):
    monkeypatch.setattr(mask_jobs, "_threads", lambda are_slow: ImmediateExecutor())
    before, after = lines_with_masks(32)
    assert before <= SLACK * lines_of(1, 32)
    assert lines_with_masks(256)[1] <= SLACK * 8 * after


def test_logit_bias_is_packed_once_per_request():
    """Not in each step: with min_tokens once for before, and once for then."""
    plain, biased = decode(32), Decodes(32, logit_bias={5: 1.0}, min_tokens=20)
    assert not plain["sample_row"]
    with Calls() as calls:
        for _ in range(30):
            biased.step()
    assert not calls.names["sample_row"] and not calls.names["pack_bias"]
