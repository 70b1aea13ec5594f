"""Reports of the engine: counts of a scripted run, each reported once, then zero."""

import time
from dataclasses import replace

import pytest

from qserve.config import EngineConfig
from qserve.engine.engine import Engine
from qserve.engine.report import EngineReport
from qserve.params.sampling_params import SamplingParams


@pytest.fixture
def make_engine(docs_5m):
    def make(steps_in_flight: int, **settings) -> Engine:
        config = EngineConfig(
            model=str(docs_5m),
            device="cpu",
            block_size=4,
            max_num_seqs=2,
            **{"enable_prefix_caching": False} | settings,
        )
        return Engine(config, steps_in_flight=steps_in_flight)

    return make


def add(engine, name, prompt, output) -> None:
    params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0)
    engine.add_request(name, [5] * prompt, params)


@pytest.mark.parametrize("steps_in_flight", [0, 1])
def test_each_step_is_reported_once(make_engine, steps_in_flight):
    engine = make_engine(steps_in_flight, num_gpu_blocks_override=50, max_num_batched_tokens=8)
    idle = EngineReport(num_pages=50)
    assert engine.report() == idle
    for name, prompt in (("a", 5), ("b", 6), ("c", 7)):
        add(engine, name, prompt, 2)
    assert engine.report() == replace(idle, num_waiting=3, num_waiting_tokens=18)
    engine.step()
    report = engine.report()
    # pages are taken for the whole of a prompt; c has no place among two
    assert report == EngineReport(
        num_running=2,
        num_waiting=1,
        num_waiting_tokens=7,
        num_pages_used=2 + 2,
        num_pages=50,
        num_step_tokens=8,
        queue_seconds=report.queue_seconds,
    )
    assert len(report.queue_seconds) == 2 and all(s > 0 for s in report.queue_seconds)
    assert engine.report() == replace(report, num_step_tokens=0, queue_seconds=())
    computed, queued = 8, 2
    while engine.has_work():
        engine.step()
        report = engine.report()
        computed += report.num_step_tokens
        queued += len(report.queue_seconds)
    assert replace(report, num_step_tokens=0) == idle
    # the last token of each is not computed any more
    assert (computed, queued) == (5 + 6 + 7 + 3, 3)


def test_time_in_the_queue_begins_when_the_request_was_sent(make_engine):
    engine = make_engine(0, num_gpu_blocks_override=50)
    sent = time.perf_counter() - 100
    engine.add_request("a", [5], SamplingParams(max_tokens=1), sent)
    engine.step()
    (seconds,) = engine.report().queue_seconds
    assert 100 < seconds < time.perf_counter() - sent


def test_first_token_reports_the_queue_time(make_engine):
    engine = make_engine(0, num_gpu_blocks_override=50)
    params = SamplingParams(max_tokens=1)
    engine.add_request("a", [5], params, time.perf_counter() - 7)
    (event,) = engine.step()
    assert event.facts.queue_seconds == engine.report().queue_seconds[0] > 7


def test_preempted_outputs_are_counted_and_queue_once(make_engine):
    engine = make_engine(0, num_gpu_blocks_override=6, admission="fits")
    add(engine, "a", 6, 12)
    add(engine, "b", 6, 12)
    preempted, queued = 0, 0
    while engine.has_work():
        engine.step()
        engine.scheduler.check_integrity()
        report = engine.report()
        preempted += report.num_preempted
        queued += len(report.queue_seconds)
    assert preempted > 0 and queued == 2


def test_abort_leaves_nothing_to_report(make_engine):
    engine = make_engine(0, num_gpu_blocks_override=50)
    for name in "abc":
        add(engine, name, 6, 50)
    engine.step()
    for name in "abc":
        engine.abort(name)
    assert replace(engine.report(), num_step_tokens=0, queue_seconds=()) == EngineReport(
        num_pages=50
    )
