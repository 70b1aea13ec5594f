"""What planning and building a step cost in Python: calls are counted, not seconds."""

import sys
from collections import Counter

import pytest

from qserve.engine.request_rows import RequestRows
from qserve.engine.step_input import StepInput
from tests.qserve.engine.simulation import make_request, make_scheduler

# At 256 requests on one core of a server CPU of 2024: schedule 0.11, build 0.22, update 0.25 ms.
CALLS_OF_A_STEP = 100  # whatever the number of requests
# its chunk, its token, its event, and in one step of 16 a page more
CALLS_OF_A_REQUEST = 4


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


def decode(num_requests, **params):
    """Calls of 16 steps, in which each request takes one more page."""
    scheduler = make_scheduler(
        num_pages=8 * num_requests, page_size=16, max_num_seqs=num_requests, budget=10**6
    )
    for number in range(num_requests):
        request = make_request(f"r{number}", 40 + number % 16, 60, group=str(number), **params)
        scheduler.add(request)
    rows, in_flight = RequestRows(num_requests), []

    def step():
        plan = scheduler.schedule()
        StepInput.build(plan, page_size=16, rows=rows)
        in_flight.append(plan)
        if len(in_flight) > 1:
            old = in_flight.pop(0)
            scheduler.update(old, [5] * sum(chunk.num_sampled for chunk in old.chunks))
        return plan

    for _ in range(3):
        step()
    with Calls() as calls:
        for _ in range(16):
            assert len(step().chunks) == num_requests
    return calls.names


@pytest.mark.parametrize("num_requests", [1, 32, 256])
def test_a_decode_step_calls_little(num_requests):
    names = decode(num_requests, temperature=0.7, top_p=0.9)
    names.subtract({name: count for name, count in names.items() if "genexpr" in name})
    calls = names.total() / 16
    most = CALLS_OF_A_STEP + CALLS_OF_A_REQUEST * num_requests
    assert calls <= most, names.most_common(12)


def test_requests_that_bias_cost_calls_of_their_own_only():
    """Requests with min_tokens or biases are packed in each step; that is no call of the others."""
    plain, biased = decode(32), decode(32, logit_bias={5: 1.0})
    assert not plain["sample_row"] and biased["sample_row"] == 16 * 32
