"""Properties of the scheduler over random schedules: no GPU, no model, no clock."""

from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.errors import InputError
from qserve.engine.kv_cache.block_pool import NULL_PAGE
from qserve.engine.request import Status
from qserve.engine.scheduling import admission
from tests.qserve.engine.simulation import EOS, Simulation, make_request, make_scheduler


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_random_schedules_keep_every_invariant(data):
    # short enough that it runs out in schedules of this size
    with mock.patch.object(admission, "PATIENCE", data.draw(st.integers(0, 4))):
        check_random_schedule(data.draw)


def check_random_schedule(draw):
    page_size = draw(st.sampled_from([1, 2, 4, 16]))
    num_pages = draw(st.integers(2, 24))
    max_num_seqs = draw(st.integers(1, 6))
    scheduler = make_scheduler(
        num_pages,
        page_size,
        max_num_seqs,
        budget=max_num_seqs + draw(st.integers(0, 20)),
        window=draw(st.sampled_from([None, 1, 3, 16])),
    )
    random = draw(st.randoms(use_true_random=False))
    tokens = iter(lambda: random.choice([1, 2, 3, 4, 5, 6, EOS]), None)
    simulation = Simulation(scheduler, depth=draw(st.sampled_from([0, 1])), tokens=tokens)
    admitted, aborted = {}, set()
    names = st.sampled_from(draw(st.sampled_from([[""], ["", "a"], ["", "a", "b"]])))
    for number in range(draw(st.integers(1, 12))):
        request = make_request(
            f"r{number}",
            prompt=draw(st.integers(1, 40)),
            max_tokens=draw(st.integers(1, 20)),
            client=draw(names),
            group=draw(names),
            ignore_eos=False,
        )
        try:
            scheduler.add(request)
            admitted[request.request_id] = request
        except InputError as error:
            needed = scheduler.pool.pages_for(request.num_prompt_tokens + request.max_tokens - 1)
            assert needed > num_pages
            assert request.request_id in str(error)
        for _ in range(draw(st.integers(0, 4))):
            simulation.step()
        if admitted and draw(st.booleans()):
            name = draw(st.sampled_from(sorted(admitted)))
            if admitted[name].status is not Status.FINISHED:
                scheduler.finish(admitted[name])
                aborted.add(name)
    simulation.run_out()
    assert simulation.done.keys() | aborted == admitted.keys()
    assert not simulation.done.keys() & aborted
    assert scheduler.pool.num_free == num_pages
    assert len(scheduler.waiting) == scheduler.waiting.num_tokens == 0
    ran = {
        name for name, request in admitted.items() if request.num_computed or name not in aborted
    }
    in_order = [request.request_id for request in simulation.admitted]
    assert len(set(in_order)) == len(in_order), "admitted twice"
    assert ran <= set(in_order) <= admitted.keys()
    for flow in {request.flow for request in simulation.admitted}:
        order = [int(r.request_id[1:]) for r in simulation.admitted if r.flow == flow]
        assert order == sorted(order), "first come, first served within a group"
    for name, reason in simulation.done.items():
        request = admitted[name]
        output = request.token_ids[request.num_prompt_tokens :]
        assert len(output) <= request.max_tokens
        assert EOS not in output[:-1]
        assert (reason == "stop") == (output[-1] == EOS)
        assert reason == "stop" or len(output) == request.max_tokens


def test_decode_shares_steps_with_chunks_of_a_long_prompt():
    scheduler = make_scheduler(num_pages=64, budget=8)
    simulation = Simulation(scheduler, 0, iter(lambda: 1, None))
    short, long = make_request("r0", 2, 20), make_request("r1", 50, 2)
    scheduler.add(short)
    simulation.step()
    scheduler.add(long)
    plan = scheduler.schedule()
    assert [(c.request.request_id, c.start, c.count) for c in plan.chunks] == [
        ("r0", 2, 1),
        ("r1", 0, 7),
    ]
    assert [chunk.num_sampled for chunk in plan.chunks] == [1, 0]


def test_youngest_request_is_preempted_and_keeps_tokens():
    scheduler = make_scheduler(num_pages=4, page_size=2, max_num_seqs=4, budget=16)
    old, young = make_request("r0", 3, 6), make_request("r1", 3, 6)
    scheduler.add(old)
    scheduler.add(young)
    simulation = Simulation(scheduler, 0, iter(lambda: 1, None))
    simulation.run_until(lambda: young.facts.num_preemptions)
    assert young.status is Status.WAITING
    assert len(young.token_ids) > 3
    assert old.facts.num_preemptions == 0
    simulation.run_out()
    assert simulation.done == {"r0": "length", "r1": "length"}


def test_token_in_flight_counts_towards_max_tokens():
    scheduler = make_scheduler()
    scheduler.add(make_request("one", prompt=3, max_tokens=1))
    assert scheduler.schedule().chunks[0].num_sampled == 1
    assert scheduler.schedule().chunks == ()  # its only token is under way


def test_end_token_discovered_late_drops_the_token_after_it():
    scheduler = make_scheduler()
    request = make_request("one", prompt=3, max_tokens=5)
    scheduler.add(request)
    first = scheduler.schedule()
    second = scheduler.schedule()
    (event,) = scheduler.update(first, [EOS])
    assert (event.finish_reason, event.ended_by_token) == ("stop", True)
    assert scheduler.update(second, [3]) == []
    assert request.token_ids[3:] == [EOS]
    assert scheduler.pool.num_free == scheduler.pool.num_pages


def test_failed_row_ends_only_its_request():
    scheduler = make_scheduler()
    bad, good = make_request("bad"), make_request("good")
    scheduler.add(bad)
    scheduler.add(good)
    events = scheduler.update(scheduler.schedule(), ["NaN", 3])
    assert [(e.request_id, e.finish_reason) for e in events] == [("bad", "error"), ("good", None)]
    assert events[0].error == "NaN"
    scheduler.check_integrity()


@pytest.mark.parametrize(("end", "stop_token"), [(5, 5), (EOS, None)])
def test_end_tokens_are_ignored_before_min_tokens(end, stop_token):
    """The output has min_tokens tokens before the one that ends it, as the sampler sees to."""
    scheduler = make_scheduler()
    request = make_request("one", max_tokens=9, stop_token_ids=(5,), min_tokens=2)
    scheduler.add(request)
    events = []
    for _ in range(3):
        events += scheduler.update(scheduler.schedule(), [end])
    assert [e.finish_reason for e in events] == [None, None, "stop"]
    assert (events[2].stop_token, events[2].ended_by_token) == (stop_token, True)


def test_budget_below_the_number_of_requests_is_refused():
    with pytest.raises(InputError, match="max_num_batched_tokens.*at least max_num_seqs"):
        make_scheduler(max_num_seqs=9, budget=8)


def test_chunk_may_sample_several_tokens():
    """For example a step that verifies drafts; the request accepts the tokens up to its end."""
    scheduler = make_scheduler(num_pages=64)
    first, second = make_request("r0", max_tokens=9), make_request("r1", max_tokens=9)
    for request in (first, second):
        scheduler.add(request)
    plan = scheduler.schedule()
    chunks = tuple(chunk._replace(num_sampled=3) for chunk in plan.chunks)
    for request in (first, second):
        request.num_pending = 3
    events = scheduler.update(replace(plan, chunks=chunks), [2, 3, 4, 2, EOS, 4])
    assert [event.token_ids for event in events] == [(2, 3, 4), (2, EOS)]
    assert [event.finish_reason for event in events] == [None, "stop"]
    scheduler.check_integrity()


def test_pages_outside_the_window_are_freed():
    """With 40 tokens in pages of 4, a query sees 6: it and the next one need 3 pages at most."""
    scheduler = make_scheduler(10, 4, 2, budget=8, window=6)
    request = make_request("r0", prompt=16, max_tokens=24)
    scheduler.add(request)
    simulation = Simulation(scheduler, 0, iter(lambda: 1, None))
    held = []
    while scheduler.num_requests:
        simulation.step()
        if request.num_computed > 24:
            held.append(scheduler.pool.num_pages - scheduler.pool.num_free)
    assert max(held[:-1]) == 3 and min(held[:-1]) == 2
    assert scheduler.pool.num_free == 10


def test_preemption_frees_only_pages_still_held():
    """A preempted request frees the pages that it still holds, not those already released."""
    scheduler = make_scheduler(10, 4, 2, budget=8, window=4)
    request = make_request("r0", prompt=24, max_tokens=12)
    scheduler.add(request)
    simulation = Simulation(scheduler, 0, iter(lambda: 1, None))
    simulation.run_until(lambda: request.num_computed >= 26)
    assert request.block_table.count(NULL_PAGE) == 5
    scheduler.finish(request)
    assert scheduler.pool.num_free == 10 and request.block_table == []
    scheduler.check_integrity()


def asking(name, prompt):
    """A request for the log probabilities of its prompt."""
    request = make_request(name, prompt=prompt, max_tokens=1, prompt_logprobs=20)
    request.prompt_logprobs = []
    return request


def test_log_probabilities_of_prompts_yield_to_decodes(monkeypatch):
    """They cost more than their tokens; otherwise decodes would wait for a whole step's budget."""
    monkeypatch.setattr("qserve.engine.scheduling.chunked_prefill.ROWS_BESIDE_DECODES", 5)
    scheduler = make_scheduler(num_pages=64, budget=40, max_num_seqs=8)
    alone = asking("alone", 30)
    scheduler.add(alone)
    plan = scheduler.schedule()
    assert [(chunk.request, chunk.count) for chunk in plan.chunks] == [(alone, 30)]
    scheduler.update(plan, [9])
    decoding = make_request("decoding", prompt=2, max_tokens=20)
    scheduler.add(decoding)
    scheduler.update(scheduler.schedule(), [9])
    crowd = [asking(f"crowd{index}", 12) for index in range(4)]
    plain = make_request("plain", prompt=8, max_tokens=2)
    for request in (*crowd, plain):
        scheduler.add(request)
    counts = []
    while any(request.status is not Status.FINISHED for request in crowd):
        plan = scheduler.schedule()
        # the last token of a prompt predicts none of its tokens
        num_scored = sum(
            min(each.end, 11) - each.start for each in plan.chunks if each.request in crowd
        )
        counts.append(num_scored)
        assert num_scored <= 5 and decoding in {chunk.request for chunk in plan.chunks}
        scheduler.update(plan, [9] * sum(chunk.num_sampled for chunk in plan.chunks))
    assert counts[0] == 5 and sum(counts) == 4 * 11
    assert plain.num_computed or plain.status is Status.FINISHED
