"""Ranks that die, hang or lose their leader: one clear error, and no process that stays."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qkernels.collective.channels import PeerLostError
from qserve.engine.distributed import executors, rank_group
from qserve.engine.distributed.rank_channel import RankDiedError
from qserve.lora.request import LoRARequest
from tests.adapters import write_adapter
from tests.qserve.parallel.engines import tokens

ROOT = Path(__file__).parents[3]
WAIT_SECONDS = 60  # a guard against hanging, never reached
pytestmark = pytest.mark.exhaustive
KILLED = "rank 1 died: its process ended with code -9"


@pytest.fixture
def processes(monkeypatch):
    """The processes of the ranks that a test starts. All have ended when it has."""
    monkeypatch.setattr(executors, "MODULE", "tests.qserve.parallel.dying_rank")
    started, make = [], executors.start_child_blocking

    def noting(*arguments):
        process, connection = make(*arguments)
        started.append(process)
        return process, connection

    monkeypatch.setattr(executors, "start_child_blocking", noting)
    yield started
    assert started and all(process.poll() is not None for process in started)


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("call", ["start", "load", "num_pages_that_fit", "prepare", "launch"])
def test_rank_death_ends_engine(call, tensor, stages, tiny_model, many, processes, monkeypatch):
    """Before it has met the others, too: the leader does not wait for it."""
    monkeypatch.setenv("QSERVE_TEST_RANK", f"dies@{call}")
    with pytest.raises(RankDiedError, match=KILLED):
        llm = many(tiny_model("llama"), tensor, stages)
        try:
            tokens(llm, [[5, 6]])
        finally:
            llm.close()
    monkeypatch.setenv("QSERVE_TEST_RANK", "dies@nothing")
    llm = many(tiny_model("llama"), tensor, stages)
    assert tokens(llm, [[5, 6]])[0], "nothing of the first start is left"
    llm.close()


def test_rank_death_during_adapter_load(tiny_model, tmp_path, many, processes, monkeypatch):
    monkeypatch.setenv("QSERVE_TEST_RANK", "dies@read_adapter")
    folder = tiny_model("llama")
    lora = LoRARequest("a", 1, str(write_adapter(folder, tmp_path / "a")))
    llm = many(folder, 2, enable_lora=True)
    with pytest.raises(RankDiedError, match=KILLED):
        tokens(llm, [[5, 6]], [lora])
    llm.close()


def test_hanging_rank_is_killed(tiny_model, many, processes, monkeypatch):
    monkeypatch.setattr(executors, "END_SECONDS", 0.5)
    monkeypatch.setenv("QSERVE_TEST_RANK", "stands@nothing")
    llm = many(tiny_model("llama"), 2)
    assert tokens(llm, [[5, 6]])[0]
    os.kill(processes[0].pid, signal.SIGSTOP)
    llm.close()
    assert processes[0].poll() == -signal.SIGKILL


def test_ranks_print_their_stacks_if_one_does_not_send(
    tiny_model, many, processes, monkeypatch, capfd
):
    """They go on afterwards."""
    monkeypatch.setattr(rank_group, "FAILURE_SECONDS", 0.1)
    monkeypatch.setenv("QSERVE_TEST_RANK", "stands@nothing")
    llm = many(tiny_model("llama"), 2)
    before = tokens(llm, [[5, 6]])
    workers = llm.engine.workers
    workers._rank_group.explain(RuntimeError("of another kind"))
    with pytest.raises(PeerLostError), workers._in_step():
        raise PeerLostError("all-reduce on rank 0", "rank 1 did not send its data", "restart")
    assert tokens(llm, [[5, 6]]) == before
    shown = capfd.readouterr().err
    assert shown.count("Current thread") == 1 and "rank_process.py" in shown
    llm.close()


LEADER = """
from tests.qserve.parallel.engines import start, tokens
llm = start({folder!r}, 2)
(link,) = llm.engine.workers._rank_group._links
print(link._handle._process.pid, flush=True)
while True:
    tokens(llm, [[5, 6]])
"""


def test_ranks_end_when_their_leader_is_killed_in_a_step(tiny_model):
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER.format(folder=str(tiny_model("llama")))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        text=True,
    )
    try:
        pid = int(leader.stdout.readline())
        time.sleep(0.2)  # into the steps; at any other moment it holds, too
    finally:
        leader.kill()
        leader.wait()
    until = time.monotonic() + WAIT_SECONDS
    while is_running(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_running(pid)


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
