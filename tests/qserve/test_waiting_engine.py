"""An engine process that starts before its client: it serves, and it never outlives the caller."""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from formats.errors import InputError
from qserve import cli
from qserve.config import EngineConfig, ServerConfig
from qserve.engine.ipc.client import EngineClient
from qserve.engine.ipc.supervisor import EngineSupervisor
from qserve.engine.ipc.waiting import WaitingEngine
from qserve.params.sampling_params import SamplingParams
from tests.qserve.test_process import FAKE, HERE, collect, is_running, journal, tokens, until

__all__ = ["journal"]  # a fixture of every test: it lets the process find the fake engine
ROOT = HERE.parents[1]
PARAMS = SamplingParams(max_tokens=3)


def pid_of(waiting: WaitingEngine) -> int:
    return waiting._child[0].pid


def start(waiting: WaitingEngine, model: str = "fine"):
    config = EngineConfig(model=model)
    return EngineClient.start(config, engine=FAKE, check=False, waiting=waiting)


def test_client_uses_prestarted_engine_process():
    async def scenario():
        waiting = WaitingEngine(engine=FAKE)
        pid = pid_of(waiting)
        client = await start(waiting)
        assert client._process.pid == pid and client._process.returncode is None
        assert tokens(await collect(client, "r", [1], PARAMS)) == [2, 3, 4]
        waiting.close()  # as the server does in the end: the process is the client's
        assert is_running(pid)
        await client.close()
        assert not is_running(pid) and client._process.returncode is not None

    asyncio.run(scenario())


def test_process_death_is_reported_with_exit_code():
    async def scenario():
        client = await start(WaitingEngine(engine=FAKE))
        os.kill(client._process.pid, signal.SIGKILL)
        assert "exit code -9" in await client.wait_until_dead()
        await client.close()

    asyncio.run(scenario())


def test_prestarted_process_exit_is_an_error():
    waiting = WaitingEngine(engine=FAKE)
    os.kill(pid_of(waiting), signal.SIGTERM)
    waiting._child[0].wait()
    with pytest.raises(InputError, match="ended with exit code -15 while it was starting"):
        asyncio.run(start(waiting))


@pytest.mark.parametrize("problem", ["model", "import"])
def test_failed_start_ends_the_process(problem):
    engine = FAKE if problem == "model" else "no_such_module:Engine"
    waiting = WaitingEngine(engine=engine)
    words = "no such arch" if problem == "model" else "No module named 'no_such_module'"
    with pytest.raises(InputError, match=words):
        asyncio.run(start(waiting, model="unusable"))
    assert not is_running(pid_of(waiting))


def test_restart_starts_a_new_process():
    async def scenario():
        waiting = WaitingEngine(engine=FAKE)
        config = EngineConfig(model="fine")
        engine = await EngineSupervisor.start(
            config, restarts=1, engine=FAKE, check=False, waiting=waiting
        )
        os.kill(pid_of(waiting), signal.SIGKILL)
        await until(lambda: not engine.is_alive)
        await until(lambda: engine.is_alive)
        assert tokens(await collect(engine, "r", [1], PARAMS)) == [2, 3, 4]
        await engine.close()

    asyncio.run(scenario())


def test_unused_prestarted_process_is_ended():
    waiting = WaitingEngine(engine=FAKE)
    waiting.close()
    assert not is_running(pid_of(waiting))
    forgotten = WaitingEngine(engine=FAKE)
    pid = pid_of(forgotten)
    del forgotten
    assert not is_running(pid)


@pytest.mark.exhaustive
def test_prestarted_process_exits_with_killed_server():
    async def scenario():
        waiting = WaitingEngine(engine=FAKE)
        waiting._child[1].close()  # as the system does for a process that is gone
        await until(lambda: not is_running(pid_of(waiting)))

    asyncio.run(scenario())


@pytest.fixture
def descriptors():
    """Soft and hard limit of file descriptors; the soft limit is lowered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1000), hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_prestarted_engine_has_server_limits(descriptors):
    waiting = WaitingEngine.of(EngineConfig(model="fine"), ServerConfig(log_level="error"))
    try:
        process = Path(f"/proc/{pid_of(waiting)}")
        (limit,) = [x for x in (process / "limits").read_text().splitlines() if "open files" in x]
        assert int(limit.split()[3]) == int(limit.split()[4]) == descriptors
        assert "--log-level=error" in waiting._child[0].args
    finally:
        waiting.close()


@pytest.mark.parametrize("several", [{"data_parallel_size": 2}, {"prefill_engines": 1}])
def test_several_engines_start_with_their_own_settings(several):
    assert WaitingEngine.of(EngineConfig(model="fine", **several), ServerConfig()) is None


FIRST_PROCESS = """
import json, os, sys
def at_start_of_a_process(event, arguments):
    if event == "subprocess.Popen":
        print(json.dumps([arguments[1], sorted(sys.modules)]), flush=True)
        os._exit(0)
sys.addaudithook(at_start_of_a_process)
from qserve.cli import main
sys.exit(main(["serve", "a_model"]))
"""


def test_process_starts_before_the_server_is_imported():
    command = [sys.executable, "-c", FIRST_PROCESS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    command, modules = json.loads(done.stdout)
    assert "qserve.engine.ipc.process" in command
    heavy = {"torch", "numpy", "pydantic", "starlette", "uvicorn", "msgspec", "tokenizers"}
    assert not heavy & {*modules} and "qserve.server.serve" not in modules


def test_command_ends_the_process_with_an_error(monkeypatch, tmp_path, capfd):
    started, make = [], WaitingEngine.__init__

    def record(waiting, *arguments):
        make(waiting, *arguments, engine=FAKE)
        started.append(pid_of(waiting))

    monkeypatch.setattr(WaitingEngine, "__init__", record)
    assert cli.main(["serve", str(tmp_path / "nothing"), "--port", "0"]) == 1
    (pid,) = started
    assert not is_running(pid) and "nothing" in capfd.readouterr().err
