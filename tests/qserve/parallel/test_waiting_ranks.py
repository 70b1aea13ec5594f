"""Rank processes that start before the engine is imported."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.distributed import executors
from qserve.engine.distributed.executors import WaitingRanks
from qserve.engine.engine import Engine
from qserve.engine.ipc import process
from qserve.engine.ipc.messages import Start, StartFailed
from qserve.params.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)
GUARD = 120  # seconds, against hanging


def config_of(folder, size=2):
    sizes = {"max_model_len": 64, "num_gpu_blocks_override": 32, "tensor_parallel_size": size}
    return EngineConfig(model=str(folder), device="cpu", **sizes)


def tokens_of(engine):
    engine.add_request("0", [5, 6, 7, 8], GREEDY)
    found = []
    while engine.has_work():
        for event in engine.step():
            assert not event.error
            found += event.token_ids
    return found


def test_prestarted_ranks_import_torch_and_join_engine(docs_5m):
    ranks = WaitingRanks(config_of(docs_5m))
    (number,) = ranks.process_ids
    maps, until = Path(f"/proc/{number}/maps"), time.monotonic() + GUARD
    while "libtorch_cpu" not in maps.read_text():
        assert time.monotonic() < until
        time.sleep(0.05)
    engine = Engine(config_of(docs_5m), ranks)
    try:
        found = tokens_of(engine)
        assert Path(f"/proc/{number}").exists()
    finally:
        engine.close()
    assert not Path(f"/proc/{number}").exists(), "the engine's close ends its ranks"
    ranks.close()  # of ranks that were taken: nothing
    alone = Engine(config_of(docs_5m, size=1))
    assert tokens_of(alone) == found


def test_unused_prestarted_ranks_exit_with_owner(docs_5m):
    ranks = WaitingRanks(config_of(docs_5m))
    (number,) = ranks.process_ids
    ranks.close()
    assert not Path(f"/proc/{number}").exists()


@pytest.mark.parametrize(
    ("settings", "started"),
    [
        ({"tensor_parallel_size": 2}, [1]),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, [1, 2, 3]),
        ({}, []),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, []),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_ranks_start_before_the_engine_is_imported(settings, started, fails, monkeypatch, tmp_path):
    """An engine that cannot start ends them."""
    events = []

    class Fake:
        """A process, or its connection."""

        def close(self):
            events.append("closed")

    def start(module, *arguments):
        events.append(arguments[0])
        return Fake(), Fake()

    def engine(config, ranks=None):
        events.append("made")
        assert (ranks is None) == (not started)
        if ranks is not None and not fails:
            ranks.take()
        if fails:
            raise InputError("x", "is wrong")
        return SimpleNamespace(max_model_len=1, vocab_size=1, report=lambda: None)

    monkeypatch.setattr(executors, "start_child_blocking", start)
    monkeypatch.setattr(executors, "stop_blocking", lambda *_: events.append("stopped"))
    monkeypatch.setattr(process, "state_of", lambda engine: None)
    monkeypatch.setattr(process, "Ready", lambda **facts: None)
    monkeypatch.setitem(sys.modules, "an_engine", SimpleNamespace(make=engine))
    sent = []
    line = SimpleNamespace(send=sent.append, send_last=sent.append)
    message = Start(config=EngineConfig(model="m", device="cpu", **settings), check=False)
    made = process._start("an_engine:make", line, SimpleNamespace(get=lambda: message))
    ranks = [f"--rank={rank}" for rank in started]
    assert events[: len(ranks) + 1] == [*ranks, "made"]
    ended = ["closed"] * len(ranks) + ["stopped"] * len(ranks) if fails else []
    assert events[len(ranks) + 1 :] == ended
    assert (made is None) == fails == isinstance(sent[-1], StartFailed)
