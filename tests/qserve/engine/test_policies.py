"""Scheduling policies: admission order, contents of steps, preemption."""

import pytest

from formats.errors import InputError
from qserve.engine.kv_cache.block_pool import BlockPool
from qserve.engine.request import Status
from qserve.engine.scheduling.policies import (
    MAX_PASSES,
    MAX_PROMPT_STEPS,
    POLICIES,
    Phase,
    Policy,
    make_policy,
)
from qserve.engine.scheduling.preemption import cheapest_victim
from qserve.engine.scheduling.waiting_queue import MAX_BYPASSES
from tests.qserve.engine.simulation import Simulation, make_request, make_scheduler


def simulate(name, *, prefill_batch_size=1, depth=0, **settings):
    policy = make_policy(name, prefill_batch_size=prefill_batch_size)
    settings = {"num_pages": 200, "max_num_seqs": 4, "budget": 64} | settings
    return Simulation(make_scheduler(policy=policy, **settings), depth, iter(lambda: 1, None))


def names(plan):
    return [chunk.request.request_id for chunk in plan.chunks]


def phases(simulation):
    """Return for each step until the end: "p" for prompts, "d" for decodes, with their numbers."""
    found = []
    while simulation.scheduler.num_requests or simulation.in_flight:
        plan = simulation.step()
        prompts = sum(chunk.start < chunk.request.num_prompt_tokens for chunk in plan.chunks)
        found.append((prompts, len(plan.chunks) - prompts))
    return found


class ShortestFirst(Policy):
    """A custom policy."""

    def turn(self, request):
        return request.client, request.request_id

    def order(self, candidates, num_cached):
        return sorted(candidates, key=lambda request: request.num_tokens)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("depth", [0, 1])
def test_every_policy_finishes_every_request(name, depth):
    """With too few pages, and requests that come while others run."""
    simulation = simulate(name, depth=depth, num_pages=14, prefill_batch_size=2)
    for number in range(9):
        request = make_request(
            f"r{number}", 3 + 5 * (number % 3), 9, group=f"g{number}", priority=number % 2
        )
        simulation.scheduler.add(request)
        simulation.step()
    simulation.run_out()
    assert len(simulation.done) == 9
    assert simulation.scheduler.pool.num_free == 14


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_gives_running_requests_their_tokens(name):
    """With an endless stream of prompts that need no decode, such as pooled ones."""
    simulation = simulate(name, budget=16)
    running = make_request("running", max_tokens=5)
    simulation.scheduler.add(running)
    simulation.step()
    for number in range(5 * (MAX_PROMPT_STEPS + 1)):
        if running.status is Status.FINISHED:
            break
        for each in range(3):
            prompt = make_request(f"p{number} {each}", 8, max_tokens=1, group=f"{number} {each}")
            simulation.scheduler.add(prompt)
        known = running.num_known
        simulation.step()
        assert name in ("prefill-first", "controlled") or running.num_known > known
    assert running.status is Status.FINISHED


class NewestFirst(Policy):
    """A policy that would starve old requests if it could."""

    def level(self, request):
        return request.priority

    def turn(self, request):
        return request.client, request.request_id

    def order(self, candidates, num_cached):
        return sorted(candidates, key=lambda request: -request.num_steps_at_arrival)


@pytest.mark.parametrize(("priority", "least", "most"), [(0, 6, 9), (9, 64, 66)])
def test_custom_policy_cannot_starve_a_request(priority, least, most):
    """Passed over 8 times within its level, and 64 times by lower ones, with two slots."""
    scheduler = make_scheduler(num_pages=200, max_num_seqs=2, budget=64, policy=NewestFirst())
    simulation = Simulation(scheduler, 0, iter(lambda: 1, None))
    for name in ("first", "second"):
        scheduler.add(make_request(name, max_tokens=3))
    simulation.step()
    oldest = make_request("oldest", max_tokens=9, priority=priority)
    scheduler.add(oldest)
    simulation.step()
    flood = Flood(simulation, width=4)
    while oldest.status is Status.WAITING and flood.num_admitted <= most:
        flood.step()
    assert least <= flood.num_admitted <= most


def test_custom_policy_class():
    path = f"{__name__}:ShortestFirst" if "." in __name__ else None
    policy = ShortestFirst() if path is None else make_policy(path)
    scheduler = make_scheduler(num_pages=200, max_num_seqs=1, budget=64, policy=policy)
    for name, length in (("a", 9), ("b", 3), ("c", 6)):
        scheduler.add(make_request(name, length, max_tokens=1))
    simulation = Simulation(scheduler, 0, iter(lambda: 1, None))
    simulation.run_out()
    assert list(simulation.done) == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("nothing", "expected one of fcfs"),
        ("no_such_module:Class", "cannot be imported"),
        ("qserve.engine.scheduling.policies:Nothing", "cannot be imported"),
        ("qserve.engine.scheduling.policies.Phase", "not a subclass"),
        ("qserve.engine.scheduling.policies:math", "not a subclass"),
    ],
)
def test_invalid_policy_is_named(path, found):
    with pytest.raises(InputError, match=f"--scheduling-policy.*{found}"):
        make_policy(path)


@pytest.mark.parametrize(
    "path", ["qserve.engine.scheduling.policies:Policy", "qserve.engine.scheduling.policies.Policy"]
)
def test_dotted_path_accepts_two_forms(path):
    assert type(make_policy(path)) is Policy


def test_priority_precedes_arrival():
    simulation = simulate("priority", max_num_seqs=1)
    for name, priority in (("a", 5), ("b", 0), ("c", 5), ("d", -1)):
        simulation.scheduler.add(make_request(name, max_tokens=1, priority=priority))
    simulation.run_out()
    assert list(simulation.done) == ["d", "b", "a", "c"]


def test_clients_alternate_within_a_priority():
    simulation = simulate("priority", max_num_seqs=1)
    for number in range(3):
        request = make_request(f"many{number}", max_tokens=1, client="many", priority=2)
        simulation.scheduler.add(request)
    simulation.scheduler.add(make_request("one", max_tokens=1, client="one", priority=2))
    simulation.run_out()
    assert list(simulation.done) == ["many0", "one", "many1", "many2"]


def test_lower_number_preempts_a_higher_one():
    """Preempted immediately, but a limited number of times; then it finishes."""
    simulation = simulate("priority", max_num_seqs=1)
    scheduler = simulation.scheduler
    low = make_request("low", max_tokens=60, priority=9)
    scheduler.add(low)
    for number in range(MAX_BYPASSES + 2):
        simulation.run_until(lambda: low.status is Status.RUNNING)
        urgent = make_request(f"urgent{number}", max_tokens=2, priority=1)
        scheduler.add(urgent)
        simulation.step()
        assert (urgent.status is Status.RUNNING) == (number < MAX_BYPASSES)
        if urgent.status is Status.WAITING:
            break
    simulation.run_out()
    assert low.facts.num_preemptions == MAX_BYPASSES
    assert list(simulation.done)[-2:] == ["low", urgent.request_id]


def test_higher_number_is_preempted_before_a_later_lower_one():
    simulation = simulate("priority", num_pages=8, max_num_seqs=2)
    scheduler = simulation.scheduler
    low, high = make_request("low", 8, 20, priority=9), make_request("high", 8, 20, priority=1)
    scheduler.add(low)
    simulation.step()
    scheduler.add(high)
    simulation.run_until(lambda: low.facts.num_preemptions)
    assert high.status is Status.RUNNING
    simulation.run_out()
    assert high.facts.num_preemptions == 0 and list(simulation.done) == ["high", "low"]


class Flood:
    """Urgent requests without end: `width` of them wait at each step."""

    def __init__(self, simulation, width=3, priority=0):
        self.simulation, self.width, self.priority = simulation, width, priority
        self.urgent = []

    def step(self):
        waiting = sum(each.status is Status.WAITING for each in self.urgent)
        for _ in range(self.width - waiting):
            name = f"urgent{len(self.urgent)}"
            self.urgent.append(make_request(name, max_tokens=2, priority=self.priority))
            self.simulation.scheduler.add(self.urgent[-1])
        self.simulation.step()

    @property
    def num_admitted(self):
        return sum(each.status is not Status.WAITING for each in self.urgent)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seqs", [1, 3])
def test_endless_lower_numbers_do_not_starve_higher_ones(seqs, depth):
    """Three of two higher numbers: the one with k older ones is passed 64 (k + 1) times at most."""
    simulation = simulate("priority", max_num_seqs=seqs, depth=depth)
    flood = Flood(simulation, width=seqs + 2)
    flood.step()
    low = [make_request(f"low{k}", max_tokens=9, priority=9 - k % 2) for k in range(3)]
    for each in low:
        simulation.scheduler.add(each)
        simulation.scheduler.waiting.check_integrity()
        flood.step()
    before = flood.num_admitted
    for k, each in enumerate(low):
        while each.status is Status.WAITING:
            flood.step()
            # requests that a step admits together with it
            assert flood.num_admitted - before <= MAX_PASSES * (k + 1) + seqs, f"{each.request_id}"
        assert flood.num_admitted - before >= MAX_PASSES * k, "too early: the others have to wait"
        assert each.level == 0
    while any(each.request_id not in simulation.done for each in low):
        flood.step()
        assert flood.num_admitted - before < MAX_PASSES * 4 + 9 * seqs, "runs and does not end"
    assert not any(each.facts.num_preemptions for each in low)


def test_aged_request_takes_the_slot_of_a_higher_number(monkeypatch):
    """Otherwise lower numbers that could use that slot would wait for it."""
    monkeypatch.setattr(POLICIES["priority"], "max_passes", 1)
    simulation = simulate("priority", max_num_seqs=2)
    scheduler = simulation.scheduler
    low = [make_request(f"low{n}", max_tokens=400, priority=9) for n in range(2)]
    for each in low:
        scheduler.add(each)
    simulation.step()
    scheduler.add(make_request("urgent", max_tokens=400, priority=1))
    simulation.step()
    assert [each.status for each in low] == [Status.RUNNING, Status.WAITING]
    assert low[1].level == 1, "the urgent one has passed over it"
    simulation.step()
    assert [each.status for each in low] == [Status.WAITING, Status.RUNNING]
    simulation.run_out()


@pytest.mark.exhaustive
def test_many_distinct_numbers_do_not_starve_the_lowest_level():
    """However many numbers wait, one request in 65 of those that are admitted is of them."""
    simulation = simulate("priority", max_num_seqs=1)
    others = [make_request(f"own{n}", max_tokens=2, priority=n) for n in range(1, 100)]
    flood = Flood(simulation)
    flood.step()
    for each in others:
        simulation.scheduler.add(each)
    while flood.num_admitted < 5 * MAX_PASSES:
        flood.step()
    assert sum(each.status is not Status.WAITING for each in others) in (4, 5)
    assert others[0].level == 0, "the oldest goes first"


def test_fcfs_ignores_priorities():
    simulation = simulate("fcfs", max_num_seqs=1)
    for name, priority in (("a", 5), ("b", 0)):
        simulation.scheduler.add(make_request(name, max_tokens=1, priority=priority))
    simulation.run_out()
    assert list(simulation.done) == ["a", "b"]


def test_prefill_first_makes_decodes_wait():
    simulation = simulate("prefill-first", budget=8)
    simulation.scheduler.add(make_request("r0", 4, 5))
    simulation.step()
    simulation.scheduler.add(make_request("r1", 20, 5))
    assert phases(simulation) == [(1, 0)] * 3 + [(0, 2)] * 4


def test_fcfs_mixes_both():
    simulation = simulate("fcfs", budget=8)
    simulation.scheduler.add(make_request("r0", 4, 5))
    simulation.step()
    simulation.scheduler.add(make_request("r1", 20, 5))
    assert phases(simulation) == [(1, 1)] * 3 + [(0, 2)] + [(0, 1)] * 3


def test_controlled_computes_prompts_in_batches_of_their_own():
    """Two run at a time, although four fit; five waited, so the last runs alone."""
    simulation = simulate("controlled", prefill_batch_size=2, budget=16)
    for number in range(5):
        simulation.scheduler.add(make_request(f"r{number}", 12, 4, group=f"g{number}"))
    assert phases(simulation) == [
        *[(2, 0), (1, 0)],  # 16 tokens, then the other 8
        *[(2, 0), (1, 0)],
        *[(0, 4)] * 3,
        (1, 0),
        *[(0, 1)] * 3,
    ]


def test_controlled_waits_for_its_batch_while_others_run():
    simulation = simulate("controlled", prefill_batch_size=3)
    scheduler = simulation.scheduler
    scheduler.add(make_request("r0", 5, 9))
    assert names(simulation.step()) == ["r0"], "nothing else runs: a smaller batch starts"
    scheduler.add(make_request("r1", 5, 9))
    scheduler.add(make_request("r2", 5, 9))
    for _ in range(4):
        assert names(simulation.step()) == ["r0"]
    scheduler.add(make_request("r3", 5, 9))
    assert names(simulation.step()) == ["r1", "r2", "r3"]
    simulation.run_out()


def test_longest_prefix_first_is_bounded():
    simulation = simulate("longest-prefix", max_num_seqs=1)
    scheduler, prefix = simulation.scheduler, list(range(300, 316))
    scheduler.add(make_request("warm", [*prefix, 1], 1))
    simulation.run_out()
    scheduler.add(make_request("cold", 5, 1))
    for number in range(MAX_BYPASSES + 3):
        scheduler.add(make_request(f"hit{number}", [*prefix, number], 1))
    simulation.run_out()
    assert list(simulation.done).index("cold") == 1 + MAX_BYPASSES


def test_phase_without_work_is_skipped():
    class DecodesOnly(Policy):
        def phase(self, counts):
            return Phase.DECODES

    scheduler = make_scheduler(policy=DecodesOnly())
    scheduler.add(make_request("r0"))
    simulation = Simulation(scheduler, 1, iter(lambda: 1, None))
    simulation.run_out()
    assert list(simulation.done) == ["r0"]


def make_running(pool, name, num_tokens, shared=()):
    request = make_request(name, num_tokens)
    pool.share_(request.block_table, shared)
    pool.grow_(request.block_table, num_tokens)
    request.num_computed = num_tokens
    return request


def test_preemption_chooses_least_lost_work():
    pool = BlockPool(100, 4)
    long, short, sharing = (
        make_running(pool, "long", 40),
        make_running(pool, "short", 9),
        make_running(pool, "sharing", 30),
    )
    assert cheapest_victim([long, short, sharing], pool) is short
    other = make_running(pool, "other", 29, sharing.block_table[:7])
    assert cheapest_victim([long, short, sharing, other], pool) is other, "1 token against 2"
    alike = [make_running(pool, name, 8) for name in "ab"]
    assert cheapest_victim(alike, pool) is alike[1], "of equals the youngest"
    twins = [make_running(pool, "twin", 8)]
    twins.append(make_running(pool, "twin", 8, twins[0].block_table))
    assert cheapest_victim(twins, pool) is None, "who frees no page need not go"
    twins[0].level = alike[0].level = 0
    alike[1].level = 1
    assert cheapest_victim([short, *alike], pool) is alike[1], "the last level goes first"
