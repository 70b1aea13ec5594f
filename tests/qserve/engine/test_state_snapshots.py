"""State snapshots: which request starts from which, and none from a state of other tokens."""

from itertools import count
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qserve.engine.kv_cache import state_snapshots
from qserve.engine.kv_cache.host_tier import HostTier
from qserve.engine.kv_cache.state_slots import StatePool
from qserve.engine.kv_cache.state_snapshots import StateSnapshots
from qserve.engine.request import Status
from qserve.engine.step.request_rows import RequestRows
from qserve.engine.step.step_input import StepInput
from tests.qserve.engine.simulation import Simulation, make_request, make_scheduler

PAGE = 4
PREFIX = list(range(200, 200 + 8 * PAGE))


@pytest.fixture(autouse=True)
def small():
    """Make snapshots worthwhile after few tokens."""
    with (
        mock.patch.object(state_snapshots, "SPACING", 4 * PAGE),
        mock.patch.object(state_snapshots, "MIN_GAIN", PAGE),
    ):
        yield


class States:
    """Contents of slots after steps: the tokens of each state. Each step is checked."""

    def __init__(self, scheduler):
        self.left, self.rows = {}, RequestRows(scheduler.max_num_seqs)
        self.host, self.num_loaded = {}, 0
        self.scheduler, self.schedule = scheduler, scheduler.schedule
        scheduler.schedule = self.checked

    def checked(self):
        plan = self.schedule()
        self.scheduler.check_integrity()
        if plan.chunks:
            self.take(plan)
        return plan

    def take(self, plan):
        step = StepInput.build(plan, page_size=PAGE, rows=self.rows)
        if step.state_moves is not None:
            moves = step.state_moves
            for sources, source, targets, target in (
                (self.left, moves.stored_from, self.host, moves.stored_to),
                (self.left, moves.saved_from, self.left, moves.saved_to),
                (self.left, moves.restored_from, self.left, moves.restored_to),
                (self.host, moves.loaded_from, self.left, moves.loaded_to),
            ):
                assert len(set(target.tolist())) == len(target), "the order is undefined"
                found = [sources.get(slot) for slot in source.tolist()]
                targets.update(zip(target.tolist(), found, strict=True))
            self.num_loaded += len(moves.loaded_to)
        for chunk, slot in zip(plan.chunks, step.state_slots_R.tolist(), strict=True):
            tokens = chunk.request.token_ids
            if chunk.start:
                theirs, end = self.left[slot]
                assert end == chunk.start
                assert theirs is tokens or (len(theirs) >= end and theirs[:end] == tokens[:end])
            self.left[slot] = tokens, chunk.end


def simulate(num_snapshots=8, depth=0, num_seqs=4, host=None, **settings):
    settings = {"num_pages": 64, "page_size": PAGE, "budget": 64} | settings
    scheduler = make_scheduler(
        max_num_seqs=num_seqs,
        states=StatePool(num_seqs),
        snapshots=StateSnapshots(num_seqs, num_snapshots, PAGE, host),
        **settings,
    )
    simulation = Simulation(scheduler, depth, count(1000))
    simulation.states = States(scheduler)
    simulation.check_shares = no_shares
    return simulation


def no_shares(plan, decodes, prompts):
    """A prompt may get less than its share: its chunks end where copies are made."""


def run(simulation, *requests):
    for request in requests:
        simulation.scheduler.add(request)
    simulation.run_out()
    return [request.facts.num_cached for request in requests]


@pytest.mark.exhaustive
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_random_schedules_start_from_own_snapshots(data):
    """Chats with common starts, chunks, too few pages, aborts, resets, steps in flight."""
    draw = data.draw
    most, with_host = draw(st.integers(1, 4)), draw(st.booleans())
    host = HostTier(draw(st.integers(1, 5))) if with_host else None
    scheduler = make_scheduler(
        draw(st.integers(16, 40)),
        PAGE,
        most,
        budget=most + draw(st.integers(0, 24)),
        num_slots=draw(st.integers(1, 30)) if with_host else 0,
        states=StatePool(most),
        snapshots=StateSnapshots(most, draw(st.integers(1, 5)), PAGE, host),
    )
    simulation = Simulation(scheduler, draw(st.sampled_from([0, 1])), iter(lambda: 1, None))
    simulation.check_shares = no_shares
    States(scheduler)
    requests, chats = [], [PREFIX[:16], PREFIX[:23], [9] * 12]
    for number in range(draw(st.integers(1, 10))):
        start = list(draw(st.sampled_from(chats)))[:40]
        more = [300 + number] * draw(st.integers(0, 9))
        request = make_request(f"r{number}", [*start, *more], draw(st.integers(1, 20)))
        scheduler.add(request)
        requests.append(request)
        for _ in range(draw(st.integers(0, 6))):
            simulation.step()
        ended = draw(st.sampled_from(requests))
        action = draw(st.sampled_from(["", "", "abort", "fail", "reset"]))
        if action == "abort" and ended.status is not Status.FINISHED:
            scheduler.finish(ended)
        elif action == "fail" and ended.status is Status.RUNNING:
            scheduler.fail(ended, "NaN")
        elif action == "reset":
            scheduler.reset_prefix_cache()
        chats.append(ended.token_ids)
    simulation.run_out()
    assert all(request.status is Status.FINISHED for request in requests)
    assert scheduler.states.num_free == most
    scheduler.check_integrity()


def test_repeated_prompt_starts_at_last_full_page():
    simulation = simulate()
    assert run(simulation, make_request("a", [*PREFIX, 1, 2])) == [0]
    assert run(simulation, make_request("b", [*PREFIX, 1, 2])) == [len(PREFIX)]
    assert run(simulation, make_request("c", [*PREFIX, 7])) == [len(PREFIX)]
    # its last token has to be computed
    assert run(simulation, make_request("d", PREFIX)) == [0], "no copy stands before its last page"


def test_shared_prefix_is_snapshotted_by_second_and_hit_by_third():
    simulation = simulate()
    prompts = [[*PREFIX, *[number] * 9] for number in range(4)]
    cached = [run(simulation, make_request(f"r{n}", prompt))[0] for n, prompt in enumerate(prompts)]
    assert cached == [0, 0, len(PREFIX), len(PREFIX)]


def test_outputs_of_one_prompt_wait_for_snapshot():
    simulation = simulate()
    requests = [make_request(f"r{n}", [*PREFIX, 1], group="one") for n in range(4)]
    assert run(simulation, *requests) == [0, *[len(PREFIX)] * 3]


@pytest.mark.parametrize("depth", [0, 1])
def test_next_chat_turn_starts_from_output_snapshot(depth):
    """At the last multiple of SPACING, whose token the host learns of a step later."""
    simulation = simulate(depth=depth)
    turn = make_request("turn", PREFIX[:10], max_tokens=31)
    run(simulation, turn)
    next_turn = make_request("next", [*turn.token_ids, 5, 6])
    assert run(simulation, next_turn) == [8 + 2 * 4 * PAGE]
    assert len(simulation.scheduler.snapshots) == 2, "one of the prompt, one of the output"


def test_preempted_request_restores_its_snapshot():
    simulation = simulate(num_pages=14, num_seqs=2, budget=32)
    first, second = make_request("r0", 20, 20), make_request("r1", 21, 20)
    for request in (first, second):
        simulation.scheduler.add(request)
    simulation.run_until(lambda: second.facts.num_preemptions)
    simulation.run_until(lambda: second.status is Status.RUNNING)
    assert second.last_snapshot >= 20
    simulation.run_out()


def test_hit_requires_both_pages_and_snapshot():
    simulation = simulate(num_snapshots=1)
    scheduler = simulation.scheduler
    run(simulation, make_request("a", [*PREFIX, 1]), make_request("b", 3 * PAGE))
    assert len(scheduler.pool.match(make_keys(scheduler, [*PREFIX, 1]))) == 8
    assert run(simulation, make_request("c", [*PREFIX, 1])) == [0], "its copy went for b's"
    assert run(simulation, make_request("d", [*PREFIX, 1])) == [len(PREFIX)]
    scheduler.pool.invalidate_all()
    assert run(simulation, make_request("e", [*PREFIX, 1])) == [0]


def test_evicted_snapshot_is_restored_from_host():
    """With its pages, which are on the device or on the host."""
    simulation = simulate(num_snapshots=1, num_pages=12, num_slots=20, host=HostTier(3))
    snapshots = simulation.scheduler.snapshots
    run(simulation, make_request("a", [*PREFIX, 1]), make_request("b", list(range(33))))
    assert len(snapshots) == 1 and len(snapshots.host) == 1
    assert run(simulation, make_request("c", [*PREFIX, 1])) == [len(PREFIX)]
    assert simulation.states.num_loaded == 1 and simulation.scheduler.pool.host.num_loaded > 0
    assert run(simulation, make_request("d", list(range(33)))) == [32]


def test_reset_drops_snapshots_on_the_host():
    simulation = simulate(num_snapshots=1, num_slots=20, host=HostTier(3))
    run(simulation, make_request("a", [*PREFIX, 1]), make_request("b", list(range(33))))
    simulation.scheduler.reset_prefix_cache()
    assert len(simulation.scheduler.snapshots.host) == 0
    assert run(simulation, make_request("c", [*PREFIX, 1])) == [0]


def test_snapshot_of_failed_step_is_dropped():
    simulation = simulate(num_snapshots=1, num_slots=20, host=HostTier(3))
    scheduler = simulation.scheduler
    run(simulation, make_request("a", [*PREFIX, 1]))
    scheduler.add(make_request("b", list(range(33))))
    simulation.step()
    plan = scheduler.schedule()
    assert len(plan.state_moves.stored_to) == 1 and len(scheduler.snapshots.host) == 1
    scheduler.fail_step(plan, "no memory")
    assert len(scheduler.snapshots.host) == 0
    assert run(simulation, make_request("c", [*PREFIX, 1])) == [0]


def make_keys(scheduler, tokens):
    request = make_request("keys", tokens)
    scheduler.cache.add(request)
    return request.page_keys


def test_failed_step_snapshots_are_not_hit():
    simulation = simulate()
    scheduler = simulation.scheduler
    run(simulation, make_request("a", [*PREFIX, 1]))
    lost, decodes = make_request("b", [*PREFIX, 2]), make_request("c", 5)
    scheduler.add(decodes)
    simulation.step()
    scheduler.add(lost)
    plan = scheduler.schedule()
    assert plan.state_moves.restored_to.tolist() == [lost.state_slot]
    assert len(scheduler.fail_step(plan, "no memory")) == 2
    assert len(scheduler.snapshots) == 0 and scheduler.states.num_free == 4
    assert run(simulation, make_request("d", [*PREFIX, 1])) == [0]


def test_restored_request_without_tokens_fails_with_the_step():
    """It is unknown whether its state was copied."""
    simulation = simulate()
    scheduler = simulation.scheduler
    run(simulation, make_request("a", [*PREFIX, 1]))
    waits = make_request("b", [*PREFIX, 1])
    waits.follows_last, waits.mask_job = True, mock.Mock(is_done=False)
    for request in (waits, make_request("c", 5)):
        scheduler.add(request)
    plan = scheduler.schedule()
    assert [chunk.request.request_id for chunk in plan.chunks] == ["c"]
    assert {event.request_id for event in scheduler.fail_step(plan, "no memory")} == {"b", "c"}


def test_nan_logits_leave_no_snapshot():
    simulation = simulate()
    scheduler = simulation.scheduler
    scheduler.add(bad := make_request("bad", [*PREFIX, 1], max_tokens=3))
    simulation.step()
    assert bad.num_computed == len(PREFIX)
    plan = scheduler.schedule()
    assert len(scheduler.snapshots) == 1
    scheduler.update(plan, ["NaN"])
    assert len(scheduler.snapshots) == 0
    assert run(simulation, make_request("again", [*PREFIX, 1])) == [0]


def test_reset_drops_snapshots_and_running_requests_make_none():
    simulation = simulate()
    scheduler = simulation.scheduler
    run(simulation, make_request("a", [*PREFIX, 1]))
    scheduler.add(running := make_request("b", 6, max_tokens=40))
    simulation.step()
    scheduler.reset_prefix_cache()
    assert len(scheduler.snapshots) == 0
    simulation.run_out()
    assert len(running.token_ids) == 46 and len(scheduler.snapshots) == 0
    assert run(simulation, make_request("c", [*PREFIX, 1])) == [0]


def test_different_salts_share_no_snapshots():
    simulation = simulate()
    salted = [make_request(f"r{n}", [*PREFIX, 1], cache_salt=salt) for n, salt in enumerate("aba")]
    assert [run(simulation, each)[0] for each in salted] == [0, 0, len(PREFIX)]


def test_short_prompts_make_no_snapshot_step():
    with mock.patch.object(state_snapshots, "MIN_GAIN", 64):
        simulation = simulate()
        request = make_request("a", [*PREFIX, 1])
        simulation.scheduler.add(request)
        simulation.step()
        assert request.num_known == len(PREFIX) + 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda snapshots: snapshots._free.pop(),
        lambda snapshots: snapshots._slots.update({b"k": snapshots._free[0]}),
    ],
    ids=["lost", "shared"],
)
def test_integrity_check_detects_faults(spoil):
    snapshots = StateSnapshots(2, 3, PAGE)
    snapshots.check_integrity()
    spoil(snapshots)
    with pytest.raises(AssertionError, match="lost or shared"):
        snapshots.check_integrity()
