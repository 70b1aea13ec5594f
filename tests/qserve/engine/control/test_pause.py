"""Pauses: no request is lost or runs while paused, and each ends as its mode requires."""

import pytest

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.control import commands
from qserve.engine.engine import Engine
from qserve.library.beam_outputs import sampling_params
from qserve.params.beam_search_params import BeamSearchParams
from qserve.params.request_options import RequestOptions
from tests.qserve.engine.control.driven import GREEDY, PROMPTS, Clock, Driven


@pytest.fixture(params=[0, 1], ids=["no step ahead", "a step ahead"])
def driven(request, docs_5m):
    clock = Clock()
    config = EngineConfig(
        model=str(docs_5m), device="cpu", block_size=4, num_gpu_blocks_override=50
    )
    engine = Engine(config, steps_in_flight=request.param, clock=clock)
    yield Driven(engine, clock)
    engine.close()


@pytest.fixture(scope="module")
def wanted(docs_5m):
    """Tokens of the prompts without any pause."""
    engine = Engine(EngineConfig(model=str(docs_5m), device="cpu", num_gpu_blocks_override=50))
    plain = Driven(engine, Clock())
    plain.add(*PROMPTS)
    plain.run_out()
    return {name: plain.tokens(name) for name in PROMPTS}


def test_wait_lets_running_requests_finish(driven, wanted):
    driven.add("a", "b")
    driven.step(2)
    number = driven.tell(commands.PauseGeneration(mode="wait"))
    driven.add("c")
    assert not driven.is_done(number)
    driven.run_out()
    assert driven.is_done(number) and driven.engine.is_paused
    assert driven.tokens("a") == wanted["a"] and driven.tokens("b") == wanted["b"]
    assert driven.tokens("c") == [] and driven.engine.report().num_waiting == 1
    driven.tell(commands.ResumeGeneration())
    driven.run_out()
    assert driven.tokens("c") == wanted["c"]


def test_keep_stops_requests_and_continues_them(driven, wanted):
    driven.add("a", "b")
    driven.step(3)
    assert driven.is_done(driven.tell(commands.PauseGeneration(mode="keep")))
    driven.add("c")
    driven.step(3)  # the first may bring events of the step that was in flight
    seen = len(driven.events)
    driven.step(3)
    assert not driven.engine.has_work() and len(driven.events) == seen
    driven.tell(commands.ResumeGeneration())
    driven.run_out()
    assert {name: driven.tokens(name) for name in PROMPTS} == wanted


def test_operator_actions_are_logged(driven, caplog):
    caplog.set_level("INFO")
    driven.add("a", "b")
    driven.step(2)
    driven.tell(commands.PauseGeneration(mode="keep"))
    driven.step(1)
    driven.tell(commands.AbortAll())
    driven.tell(commands.ResumeGeneration())
    driven.run_out()
    found = [each.getMessage() for each in caplog.records if "command_queue" in each.name]
    assert found == [
        "Generation is paused (mode keep)",
        "2 requests were aborted by an operator",
        "Generation continues",
    ]


def test_abort_returns_partial_outputs(driven, wanted):
    driven.add("a", "b")
    driven.step(3)
    driven.tell(commands.PauseGeneration(mode="abort"))
    driven.add("c")
    driven.run_out()
    assert driven.ending("a") == driven.ending("b") == "abort" and driven.tokens("c") == []
    got = driven.tokens("a")
    assert got and got == wanted["a"][: len(got)]
    assert driven.engine.report().num_pages_used == 0
    driven.tell(commands.ResumeGeneration())
    driven.run_out()
    assert driven.tokens("c") == wanted["c"]


def test_abort_all_precedes_wait_and_ends_paused_requests(driven):
    driven.add("a")
    driven.step(2)
    waiting = driven.tell(commands.PauseGeneration(mode="wait"))
    driven.add("b")
    driven.tell(commands.AbortAll())
    driven.step()
    assert driven.ending("a") == driven.ending("b") == "abort" and driven.is_done(waiting)
    assert driven.finished[0].outcome.num_requests == 2


def test_paused_request_can_be_aborted(driven, wanted):
    driven.tell(commands.PauseGeneration())
    driven.add("a", "b")
    driven.engine.abort("a")
    assert driven.engine.report().num_waiting == 1
    driven.tell(commands.ResumeGeneration())
    driven.run_out()
    assert driven.tokens("a") == [] and driven.tokens("b") == wanted["b"]


def test_paused_request_deadline_is_enforced(driven):
    driven.tell(commands.PauseGeneration())
    assert driven.engine.idle_seconds is None
    driven.add("a", timeout=5.0)
    driven.step()
    assert driven.events == [] and driven.engine.idle_seconds is not None
    driven.clock.now += 6
    driven.step()
    assert driven.ending("a") == "error"
    driven.tell(commands.ResumeGeneration())
    assert not driven.engine.has_work()


def test_paused_request_that_cannot_run_is_refused(driven):
    driven.tell(commands.PauseGeneration())
    with pytest.raises(InputError, match="expected a prompt of 1 to 199 tokens, found 300"):
        driven.engine.add_request("x", [5] * 300, GREEDY)


def test_aborted_beam_search_is_refused(driven):
    params = BeamSearchParams(beam_width=2, max_tokens=6)
    driven.engine.add_request(
        "x", [5, 6, 7], sampling_params(params), options=RequestOptions(beam_search=params)
    )
    driven.step(2)
    driven.tell(commands.AbortAll())
    driven.run_out()
    (event,) = (each for each in driven.events if each.finish_reason)
    assert event.is_asked_for and "aborted" in event.error
    driven.engine.scheduler.check_integrity()


def test_sleep_keeps_requests_and_wakes_only_its_own_pause(driven, wanted):
    driven.add("a")
    driven.step(3)
    assert driven.is_done(driven.tell(commands.Sleep(level=2, mode="keep")))
    driven.add("b")
    driven.step(2)
    assert not driven.engine.has_work() and not driven.engine.use_idle_time()
    driven.tell(commands.ResumeGeneration())
    assert "is asleep" in str(driven.finished[-1].error)
    driven.tell(commands.WakeUp())
    driven.run_out()
    assert driven.tokens("a") == wanted["a"] and driven.tokens("b") == wanted["b"]
    driven.tell(commands.PauseGeneration())
    driven.tell(commands.Sleep())
    driven.tell(commands.WakeUp())
    assert driven.engine.is_paused  # as before the sleep


def test_unknown_mode_is_refused_and_nothing_stops(driven, wanted):
    driven.add("a")
    driven.tell(commands.PauseGeneration(mode="now"))
    assert "expected one of abort, wait, keep" in str(driven.finished[-1].error)
    driven.run_out()
    assert driven.tokens("a") == wanted["a"]


def test_refused_update_keeps_running_requests(driven, wanted):
    driven.add("a")
    driven.step(2)
    driven.tell(commands.UpdateWeights(folder="/nowhere", mode="abort"))
    assert "/nowhere" in str(driven.finished[-1].error)
    driven.run_out()
    assert driven.tokens("a") == wanted["a"]


def test_update_drops_the_prefix_cache_and_keeps_requests(driven, docs_5m, wanted):
    driven.add("a")
    driven.run_out()
    driven.add("b")
    driven.step(3)
    driven.tell(commands.UpdateWeights(folder=str(docs_5m), version="v", mode="keep"))
    driven.engine.add_request("again", PROMPTS["a"], GREEDY)
    driven.run_out()
    facts = next(e.facts for e in driven.events if e.request_id == "again")
    assert facts.num_cached == 0 and driven.tokens("again") == wanted["a"]
    assert driven.tokens("b") == wanted["b"]
    assert driven.finished[-1].outcome.state.weight_version == "v"
