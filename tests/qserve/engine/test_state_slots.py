"""State slots: each running request has its own, and continues from the state it left there."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qserve.engine.kv_cache.state_slots import StatePool
from qserve.engine.request import Status
from qserve.engine.runner.graphs.step_buffers import GraphKey, StepBuffers
from qserve.engine.step.device_step import Batch, BatchForm
from qserve.engine.step.request_rows import RequestRows
from qserve.engine.step.step_input import StepInput
from tests.qserve.engine.make_step import make_step
from tests.qserve.engine.simulation import Simulation, make_request, make_scheduler

CPU = torch.device("cpu")


class Slots:
    """Contents of slots after steps: the owner of the state, and its number of tokens."""

    def __init__(self, scheduler):
        self.left, self.rows = {}, RequestRows(scheduler.max_num_seqs)
        self.page_size = scheduler.pool.page_size

    def take(self, plan):
        """A planned step, which may still be in flight when the next is planned."""
        if not plan.chunks:
            return
        step = StepInput.build(plan, page_size=self.page_size, rows=self.rows)
        assert len(set(step.state_slots_R.tolist())) == len(plan.chunks)
        for chunk, slot in zip(plan.chunks, step.state_slots_R.tolist(), strict=True):
            assert slot == chunk.request.state_slot >= 0
            if chunk.start:
                assert self.left[slot] == (chunk.request.request_id, chunk.start)
            self.left[slot] = chunk.request.request_id, chunk.start + chunk.count


@pytest.mark.exhaustive
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_schedules_continue_from_own_states(data):
    """With fewer slots than places, too few pages, requests that are aborted, steps in flight."""
    draw = data.draw
    most = draw(st.integers(1, 5))
    states = StatePool(draw(st.integers(1, most)))
    scheduler = make_scheduler(
        draw(st.integers(4, 12)),
        4,
        most,
        budget=most + draw(st.integers(0, 12)),
        states=states,
        prefix_caching=False,
    )
    slots, schedule = Slots(scheduler), scheduler.schedule

    def checked():
        plan = schedule()
        scheduler.check_integrity()
        slots.take(plan)
        return plan

    scheduler.schedule = checked
    simulation = Simulation(scheduler, depth=draw(st.sampled_from([0, 1])), tokens=iter(int, 1))
    requests = []
    for number in range(draw(st.integers(1, 8))):
        request = make_request(
            f"r{number}", prompt=draw(st.integers(1, 10)), max_tokens=draw(st.integers(1, 6))
        )
        scheduler.add(request)
        requests.append(request)
        for _ in range(draw(st.integers(0, 3))):
            simulation.step()
        ended = draw(st.sampled_from(requests))
        if draw(st.booleans()) and ended.status is not Status.FINISHED:
            scheduler.finish(ended)
    for _ in range(300):
        if not scheduler.num_requests:
            break
        simulation.step()
    assert all(request.status is Status.FINISHED for request in requests)
    assert states.num_free == states.num_slots and slots.left.keys() <= set(range(most))


def test_request_waits_for_a_slot():
    scheduler = make_scheduler(64, 4, 4, budget=64, states=StatePool(1), prefix_caching=False)
    first, second = make_request("a", 5), make_request("b", 5)
    scheduler.add(first)
    scheduler.add(second)
    assert [chunk.request for chunk in scheduler.schedule().chunks] == [first]
    assert second.state_slot == -1 and second.status is Status.WAITING
    scheduler.finish(first)
    assert (first.state_slot, scheduler.states.num_free) == (-1, 1)
    assert [chunk.request for chunk in scheduler.schedule().chunks] == [second]


def test_preemption_frees_the_slot():
    scheduler = make_scheduler(2, 4, 2, budget=16, states=StatePool(2), prefix_caching=False)
    first, second = make_request("a", 4), make_request("b", 4)
    scheduler.add(first)
    scheduler.add(second)
    simulation = Simulation(scheduler, depth=0, tokens=iter(int, 1))
    simulation.step()
    simulation.step()
    assert second.facts.num_preemptions == 1 and second.state_slot == -1
    assert scheduler.states.num_free == 1
    scheduler.check_integrity()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda states, a, b: setattr(a, "state_slot", b.state_slot),
        lambda states, a, b: states.release_(a),
        lambda states, a, b: states._free.pop(),
    ],
    ids=["shared", "given back", "lost"],
)
def test_integrity_check_detects_faults(spoil):
    states = StatePool(3)
    a, b = make_request("a"), make_request("b")
    states.take_(a)
    states.take_(b)
    states.check_integrity([a, b], [])
    spoil(states, a, b)
    with pytest.raises(AssertionError, match="lost or shared"):
        states.check_integrity([a, b], [])


def test_stateless_model_has_no_slots():
    states, request = StatePool(None), make_request("a")
    states.take_(request)
    assert request.state_slot == -1 and states.num_free > 10**9
    states.release_(request)
    states.check_integrity([request], [])


def test_unscheduled_steps_write_no_state():
    """Warm-up steps, and those of Engine.logits: they must not write over a request's state."""
    step = StepInput.padding(num_requests=3, count=2, max_context_len=8, page_size=4)
    assert step.state_slots_R.tolist() == [-1, -1, -1]


@pytest.mark.parametrize("is_chunk", [False, True])
def test_slots_are_inputs_of_graphs(is_chunk):
    """At a fixed place; requests that are not there have none."""
    key = GraphKey(is_chunk=is_chunk, num_tokens=6, num_requests=6)
    buffers = StepBuffers([key], 6, 2, CPU, with_states=True)
    batch = buffers.batch(key, 8)
    for slots in ([4, 0, 2], [1]):
        counts = [1] * len(slots)
        step = make_step(counts, state_slots_R=np.array(slots, np.int32))
        buffers.fill_(key, step)
        assert batch.state_slots_R.dtype == torch.int32
        assert batch.state_slots_R.tolist() == slots + [-1] * (6 - len(slots))
    buffers.pad_(key)
    assert set(batch.state_slots_R.tolist()) == {-1}


def test_slots_are_sent_only_for_stateful_models():
    step = make_step([1, 1], state_slots_R=np.array([3, 1], np.int32))
    assert Batch.of(step, CPU, BatchForm(page_size=4)).state_slots_R is None
    with_states = BatchForm(with_states=True, page_size=4)
    assert Batch.of(step, CPU, with_states).state_slots_R.tolist() == [3, 1]
