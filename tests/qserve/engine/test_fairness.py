"""A small request next to large ones: the number of steps until its first token."""

from unittest import mock

import pytest

from qserve.engine.scheduling import admission
from qserve.engine.scheduling.admission import PATIENCE
from qserve.engine.scheduling.waiting_queue import MAX_BYPASSES
from tests.qserve.engine.simulation import Simulation, make_request, make_scheduler

TOKENS = 1500  # of each prompt of the large request


def simulate(**settings):
    """The defaults of the engine: 256 requests and 8192 tokens in a step, pages of 16 tokens."""
    scheduler = make_scheduler(
        **{"num_pages": 30_000, "page_size": 16, "max_num_seqs": 256, "budget": 8192} | settings
    )
    simulation = Simulation(scheduler, 1, iter(lambda: 1, None))
    simulation.memory = None  # 400,000 tokens of it take minutes to check
    return simulation


def add_large(simulation, n=256, **fields):
    for number in range(n):
        request = make_request(f"r{number}", TOKENS, 2000, group="large", **fields)
        simulation.scheduler.add(request)


def steps_to_first_token(simulation, request, limit=200):
    simulation.scheduler.add(request)
    for count in range(1, limit):
        simulation.step()
        if request.num_known > request.num_prompt_tokens:
            return count
    raise AssertionError(f"no token in {limit} steps")


SMALL = {"prompt": 5, "max_tokens": 4, "group": "small"}
# a token is known one step after the one that samples it
AT_ONCE = 2


@pytest.mark.parametrize("num_steps", [0, 1, 20])
def test_large_request_does_not_delay_small_request(num_steps):
    simulation = simulate()
    add_large(simulation)
    for _ in range(num_steps):
        simulation.step()
    assert simulation.scheduler.waiting.num_tokens > 100_000
    # The first step is the large one's, if it came first, and fills the budget up to one prompt.
    assert steps_to_first_token(simulation, make_request("s", **SMALL)) == AT_ONCE


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("of", "num_pages"), [("places", 30_000), ("pages", 60 * -(-TOKENS // 16))]
)
@pytest.mark.parametrize("client", ["", "another"])
def test_small_request_runs_soon_when_large_ones_have_all_slots_or_pages(of, num_pages, client):
    simulation = simulate(num_pages=num_pages)
    scheduler = simulation.scheduler
    add_large(simulation)
    for _ in range(60):
        simulation.step()
    assert of == "pages" or len(scheduler.running) == 256
    num_running = len(scheduler.running)
    request = make_request("s", **SMALL, client=client)
    assert steps_to_first_token(simulation, request) <= PATIENCE + 1 + AT_ONCE
    assert len(scheduler.running) >= num_running - 1
    assert scheduler.running.index(request) == 1, "the last is the first to give way"


def test_late_request_is_not_preempted_first():
    """Pages run out all the time: the large request's outputs grow and preempt each other."""
    simulation = simulate(num_pages=6 * -(-TOKENS // 16))
    add_large(simulation, n=8)
    for _ in range(20):
        simulation.step()
    request = make_request("s", 5, 60, group="small")
    simulation.scheduler.add(request)
    simulation.run_until(lambda: "s" in simulation.done)
    assert request.facts.num_preemptions == 0
    assert any(each.facts.num_preemptions for each in simulation.scheduler.waiting)


def test_skips_of_preempted_request_are_bounded():
    """It is passed over by requests that fit when it does not."""
    simulation = simulate(num_pages=4, page_size=64)
    scheduler = simulation.scheduler
    scheduler.add(make_request("r0", 4, 50, group="a"))
    simulation.step()
    lost = make_request("r1", 200, 2, group="b")
    lost.facts = lost.facts._replace(num_preemptions=1)
    scheduler.waiting.push_front(lost)
    for number in range(3 * MAX_BYPASSES):
        scheduler.add(make_request(f"s{number}", 1, 1, group=f"g{number}"))
    with mock.patch.object(admission, "PATIENCE", 0):
        simulation.run_until(lambda: lost not in scheduler.waiting)
    assert "r0" in simulation.done
    small = [request for request in simulation.admitted if request.request_id != "r0"]
    assert len(small) == MAX_BYPASSES == lost.num_bypasses


def test_small_requests_wait_concurrently():
    simulation = simulate(max_num_seqs=64, num_pages=9000)
    add_large(simulation, n=64)
    for _ in range(20):
        simulation.step()
    crowd = [make_request(f"s{n}", 5, 4, client=f"c{n % 3}", group=f"g{n}") for n in range(20)]
    for request in crowd:
        simulation.scheduler.add(request)
    for _ in range(PATIENCE + 1 + len(crowd) + AT_ONCE):
        simulation.step()
    assert all(request.num_known > 5 for request in crowd)


def test_many_api_requests_of_one_client_do_not_keep_slots_from_another():
    simulation = simulate(max_num_seqs=8, num_pages=1200)
    for number in range(20):
        request = make_request(f"r{number}", 20, 2000, client="many", group=str(number))
        simulation.scheduler.add(request)
    for _ in range(5):
        simulation.step()
    own = make_request("own", **SMALL | {"client": "many"})
    with pytest.raises(AssertionError, match="no token in 50 steps"):
        steps_to_first_token(simulation, own, limit=50)
    other = make_request("other", **SMALL | {"client": "another"})
    assert steps_to_first_token(simulation, other) <= PATIENCE + 1 + AT_ONCE


def test_single_client_of_a_group_is_never_preempted_for_fairness():
    simulation = simulate(max_num_seqs=4, num_pages=100)
    requests = [make_request(f"r{number}", 20, 100) for number in range(12)]
    for request in requests:
        simulation.scheduler.add(request)
    simulation.run_out()
    assert simulation.admitted == requests
    assert not any(request.facts.num_preemptions for request in requests)


def test_frequently_preempted_request_is_protected():
    """Endless small requests compete for two slots: the large request's outputs end, too."""
    simulation = simulate(max_num_seqs=2, num_pages=100)
    large = [make_request(f"r{n}", 30, 300, group="large") for n in range(2)]
    for request in large:
        simulation.scheduler.add(request)
    for number in range(3000):
        if len(simulation.scheduler.waiting) < 3:
            simulation.scheduler.add(make_request(f"s{number}", 5, 3, group=f"g{number}"))
        simulation.step()
        if {"r0", "r1"} <= simulation.done.keys():
            break
    assert {"r0", "r1"} <= simulation.done.keys()
    assert large[0].facts.num_preemptions == 0 < large[1].facts.num_preemptions <= MAX_BYPASSES


def chunk_counts(scheduler):
    return {chunk.request.request_id: chunk.count for chunk in scheduler.schedule().chunks}


def test_short_prompt_shares_steps_with_chunks_of_a_long_one():
    scheduler = simulate().scheduler
    scheduler.add(make_request("long", 100_000, group="a"))
    assert chunk_counts(scheduler) == {"long": 8192}
    scheduler.add(make_request("behind", 5, group="a"))
    scheduler.add(make_request("longer", 120_000 - 8192, group="b"))
    scheduler.add(make_request("middle", 6000, group="c"))
    assert chunk_counts(scheduler) == {"long": 4096, "middle": 4096}
    scheduler.add(make_request("short", 5, group="d"))
    # The shortest goes first, and what others leave of their half is the long one's.
    assert chunk_counts(scheduler) == {"short": 5, "middle": 1904, "long": 8192 - 5 - 1904}
    assert chunk_counts(scheduler) == {"short": 1, "middle": 1, "long": 8190}


def test_long_prompt_gets_chunks_after_bounded_skips():
    scheduler = simulate(num_pages=10**5).scheduler
    scheduler.add(make_request("long", 400_000, group="a"))
    scheduler.add(make_request("longer", 500_000, group="b"))
    scheduler.add(make_request("same", 500_000, group="a"))
    for number in range(MAX_BYPASSES):
        assert "longer" not in chunk_counts(scheduler)
        scheduler.add(make_request(f"s{number}", 5, 1, group=f"g{number}"))
    assert chunk_counts(scheduler) == {"s7": 5, "longer": 4091, "long": 4096}
    assert chunk_counts(scheduler) == {"longer": 4096, "long": 4096}
    scheduler.add(make_request("short", 5, 1, group="late"))
    assert chunk_counts(scheduler) == {"short": 5, "longer": 4091, "long": 4096}
