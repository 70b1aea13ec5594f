"""Order of admission: turns of clients and groups, and the maximum wait of a request."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qserve.engine.scheduling.waiting_queue import (
    COST_OF_OUTPUT,
    MAX_BYPASSES,
    FairOrder,
    WaitingQueue,
)
from tests.qserve.engine.simulation import make_request


def pop(queue):
    request = queue.first()
    queue.admit(request)
    queue.check_integrity()
    return request


def push(queue, *requests):
    for request in requests:
        queue.push(request)
    queue.check_integrity()


def test_without_clients_and_groups_order_is_fcfs():
    queue, requests = WaitingQueue(), [make_request(f"r{n}", prompt=99 - n) for n in range(30)]
    push(queue, *requests)
    assert [pop(queue) for _ in requests] == requests
    assert queue.first() is None and len(queue) == queue.num_tokens == 0


def test_single_requests_of_many_groups_are_fcfs():
    queue = WaitingQueue()
    requests = [make_request(f"r{n}", prompt=1 + 97 * n % 50, group=f"g{n}") for n in range(40)]
    push(queue, *requests[:20])
    served = [pop(queue) for _ in range(10)]
    push(queue, *requests[20:])
    served += [pop(queue) for _ in range(30)]
    assert served == requests


def test_preempted_requests_come_first():
    queue = WaitingQueue()
    push(queue, make_request("r0"))
    lost = [make_request("r1", group="g"), make_request("r2", client="c")]
    for request in lost:
        queue.push_front(request)
    queue.check_integrity()
    assert queue.first_preempted is lost[1] and queue.first_in_turn().request_id == "r0"
    assert [pop(queue).request_id for _ in range(3)] == ["r2", "r1", "r0"]


def test_request_overtakes_outputs_of_a_large_request():
    queue = WaitingQueue()
    push(queue, *(make_request(f"r{n}", prompt=1500, group="large") for n in range(256)))
    pop(queue)
    push(queue, make_request("short", prompt=5, group="small"))
    assert [pop(queue).request_id for _ in range(2)] == ["short", "r1"]


def test_clients_get_equal_turns_regardless_of_number_of_requests():
    queue = WaitingQueue()
    push(
        queue,
        *(make_request(f"r{n}", prompt=9, client="many", group=f"g{n}") for n in range(64)),
        *(make_request(f"one{n}", prompt=9, client="one", group="g") for n in range(4)),
    )
    served = [pop(queue).client for _ in range(8)]
    assert served == ["many", "one"] * 4


def test_turns_are_charged_by_tokens():
    """Cost of prompts and future outputs: long prompts get fewer turns; one-token prompts cost,
    too."""
    queue = WaitingQueue()
    sizes = {"long": 3 * COST_OF_OUTPUT, "short": 1}
    for client, prompt in sizes.items():
        push(queue, *(make_request("r", prompt, client=client) for _ in range(100)))
    counts = Counter(pop(queue).client for _ in range(50))
    assert 0.9 * 4 < counts["short"] / counts["long"] < 1.2 * 4


def test_late_client_gets_no_missed_turns():
    queue = WaitingQueue()
    for client in ("early", "late"):
        push(queue, *(make_request("r", 9, client=client) for _ in range(20)))
        if client == "early":
            for _ in range(10):
                pop(queue)
    counts = Counter(pop(queue).client for _ in range(6))
    assert counts == {"early": 3, "late": 3}


def test_aborted_waiting_requests_leave_no_state():
    queue, rng = WaitingQueue(), random.Random(3)
    for _ in range(200):
        request = make_request(
            "r", rng.randint(1, 9), client=rng.choice("ab"), group=rng.choice("cd")
        )
        queue.push_front(request) if rng.random() < 0.2 else queue.push(request)
    requests = list(queue)
    rng.shuffle(requests)
    for request in requests[:150]:
        queue.remove(request)
        queue.check_integrity()
    assert sorted(map(id, (pop(queue) for _ in range(50)))) == sorted(map(id, requests[150:]))
    assert len(queue) == queue.num_tokens == 0


def test_memory_is_bounded_by_waiting_requests():
    """The oldest stays first in line while thousands arrive after it and leave."""
    queue = WaitingQueue()
    push(queue, make_request("r0"))
    for n in range(3000):
        request = make_request(f"r{n}", client=f"c{n}")
        queue.push(request)
        queue.remove(request)
    assert len(queue._heads) < 50 and len(queue._clients._heap) < 50


def test_shorter_requests_go_before_longer_ones_of_other_groups():
    queue = WaitingQueue()
    long = make_request("long", prompt=90, group="a")
    behind = make_request("behind", prompt=2, group="a")
    short = make_request("short", prompt=9, group="b")
    push(queue, long, behind, short)
    assert queue.first_shorter(50, other_than=()) is short
    assert queue.first_shorter(9, other_than=()) is None, "not of the same length"
    assert queue.first_shorter(50, other_than=[short.flow]) is None
    queue.push_front(make_request("lost"))
    assert queue.first_shorter(50, other_than=()) is None


def test_skips_of_oldest_request_are_bounded():
    queue = WaitingQueue()
    push(queue, make_request("long", prompt=90, group="a"))
    for n in range(MAX_BYPASSES):
        assert queue.passed_over(other_than=()) is None
        push(queue, make_request(f"r{n}", prompt=2, group=f"g{n}"))
        queue.admit(queue.first_shorter(50, other_than=()))
    push(queue, make_request("late", prompt=2, group="late"))
    assert queue.first_shorter(50, other_than=()) is None
    assert queue.passed_over(other_than=[("", "a")]) is None
    assert queue.passed_over(other_than=()).request_id == "long" == pop(queue).request_id
    assert queue.first_shorter(50, other_than=()).request_id == "late"


@pytest.mark.exhaustive
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_waiting_time_is_bounded(data):
    """Endless clients arrive and also choose which request to pass over."""
    draw = data.draw
    most = draw(st.integers(0, 5))
    queue, heads, admitted = WaitingQueue(max_bypasses=most), {}, 0
    rng = draw(st.randoms(use_true_random=False))
    for number in range(120):
        for _ in range(rng.choice([0, 1, 1, 3])):
            client = rng.choice(["a", "b", f"new{number}"])
            request = make_request("r", rng.randint(1, 2000), client=client, group=rng.choice("xy"))
            queue.push(request)
        waiting = {}
        for request in queue:
            waiting.setdefault(request.flow, request)
        for request in waiting.values():
            # admissions so far, and the requests that have been first of their group for longer
            heads.setdefault(request, (admitted, len([r for r in waiting.values() if r in heads])))
        if not queue:
            continue
        shorter = queue.first_shorter(rng.randint(1, 2000), other_than=())
        queue.admit(shorter or queue.first())
        queue.check_integrity()
        admitted += 1
        for request in waiting.values():
            since, num_older = heads[request]
            assert admitted - since <= (num_older + 1) * (most + 1)


@pytest.mark.exhaustive
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_waiting_clients_get_equal_shares(data):
    draw = data.draw
    clients = draw(st.lists(st.integers(1, 2000), min_size=2, max_size=5))
    queue = WaitingQueue(max_bypasses=10**6)
    for client, largest in enumerate(clients):
        for number in range(60):
            prompt = draw(st.integers(1, largest)) if number < 3 else largest
            queue.push(make_request("r", prompt, client=str(client), group=str(number % 2)))
    served = Counter()
    for _ in range(59):
        request = pop(queue)
        served[request.client] += request.num_tokens + COST_OF_OUTPUT
        shares = [served[str(client)] for client in range(len(clients))]
        assert max(shares) - min(shares) <= max(clients) + COST_OF_OUTPUT


@given(names=st.lists(st.sampled_from("abcdef"), min_size=1, max_size=30))
def test_turn_order_is_as_documented(names):
    turns = FairOrder()
    for cost, name in enumerate(names):
        turns.join(name)
        if cost % 3 == 0:
            turns.serve(turns.first(), cost)
    order = list(turns.in_order())
    assert set(order) == set(names)
    for name in order:
        assert turns.first() == name
        turns.leave(name)
    assert not turns


def test_prompt_logprobs_are_charged_as_work():
    """A client that requests them gets turns according to its work, not to its number of tokens."""
    queue, size = WaitingQueue(), 10 * COST_OF_OUTPUT
    for index in range(40):
        telling = make_request(f"t{index}", prompt=size, client="telling", prompt_logprobs=20)
        telling.prompt_logprobs = []
        push(queue, telling, make_request(f"p{index}", prompt=size, client="plain"))
    served = Counter(pop(queue).client for _ in range(42))
    assert 1.7 < served["plain"] / served["telling"] < 2.1
