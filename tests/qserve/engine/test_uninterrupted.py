"""Ctrl-C during a step: the step ends first, and the engine can be used afterwards."""

import signal
import threading

import pytest

from qserve.engine.uninterrupted import uninterrupted
from tests.qserve.parallel.engines import start, tokens


@pytest.fixture
def handled():
    """The numbers of signals whose Python handler ran."""
    found = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda number, frame: found.append(number))
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_handler_runs_after_the_block(number, handled):
    ours = signal.getsignal(number)
    with uninterrupted(), uninterrupted():
        signal.raise_signal(number)
        assert not handled
    assert handled == [number] and signal.getsignal(number) is ours


def test_second_signal_is_handled_at_once(handled):
    with uninterrupted():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert handled == [signal.SIGINT]
    assert handled == [signal.SIGINT]


def test_error_of_the_block_is_kept(handled):
    with pytest.raises(ValueError, match="planted"), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("planted")
    assert handled == [signal.SIGINT]


def test_default_action_and_other_threads_are_left_alone(monkeypatch):
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with uninterrupted():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    ran = []

    def work():
        with uninterrupted():
            ran.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ran == [signal.getsignal(signal.SIGINT)]


@pytest.mark.parametrize(
    ("tensor", "stages"),
    [(1, 1), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in ((2, 1), (1, 2)))],
)
def test_interrupted_engine_goes_on(tensor, stages, tiny_model, monkeypatch):
    llm = start(tiny_model("llama"), tensor, stages)
    want = tokens(llm, [[5, 6, 7], [8, 9]])
    workers, launched, updated = llm.engine.workers, [], []
    launch, update = workers._ours.launch, llm.engine.scheduler.update

    def interrupted(step):
        launched.append(step)
        if len(launched) == 3:
            signal.raise_signal(signal.SIGINT)
        return launch(step)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # some runners ignore it
    monkeypatch.setattr(workers._ours, "launch", interrupted)
    monkeypatch.setattr(
        llm.engine.scheduler, "update", lambda *args: updated.append(args) or update(*args)
    )
    try:
        with pytest.raises(KeyboardInterrupt):
            tokens(llm, [[5, 6, 7], [8, 9]])
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(launched) == len(updated) == 3, "the step has ended"
    assert not llm.llm_engine.has_unfinished_requests()
    assert tokens(llm, [[5, 6, 7], [8, 9]]) == want
    llm.close()
