"""Other activity in a process while a CUDA graph is captured."""

import contextlib
import gc

import pytest
import torch

from qserve.engine.runner.graphs.capture import capture


class Garbage:
    """Only the collector finds it, since it holds itself; `freed` is called then."""

    def __init__(self, freed):
        self.itself, self.freed = self, freed

    def __del__(self):
        self.freed()


@pytest.fixture
def eager_collector():
    """One that looks at all there is whenever objects are made."""
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*before)


def make_objects():
    return [[n] for n in range(3000)]


def test_garbage_collector_is_off_during_capture(eager_collector, monkeypatch):
    freed = []
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **kwargs: contextlib.nullcontext())
    with pytest.raises(ZeroDivisionError), capture(None):
        Garbage(lambda: freed.append("freed"))
        make_objects()
        assert not freed
        raise ZeroDivisionError
    assert gc.isenabled()
    make_objects()
    assert freed


def test_disabled_collector_stays_disabled(monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **kwargs: contextlib.nullcontext())
    gc.disable()
    try:
        with capture(None):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.gpu
def test_garbage_does_not_break_capture(eager_collector):
    """Garbage from an earlier engine, whose destructor waits for the device."""
    x = torch.ones(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        Garbage(torch.cuda.synchronize)
        make_objects()
        x += 1
    graph.replay()
    assert x.eq(2).all()
