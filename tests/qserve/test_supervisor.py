"""An engine that dies and is started again: what runs fails, what comes later works."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from qserve.config import EngineConfig
from qserve.engine.control.commands import EngineState, PauseGeneration, UpdateWeights
from qserve.engine.ipc import supervisor as module
from qserve.engine.ipc.supervisor import EngineSupervisor
from qserve.params.sampling_params import SamplingParams

STEP_FAILS, PROCESS_DIES = 101, 102  # of fake_engine
GUARD = 60  # seconds, against hanging


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("FAKE_ENGINE_JOURNAL", str(tmp_path / "journal"))
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.01)


def run(scenario, restarts: int) -> None:
    async def whole():
        engine = await EngineSupervisor.start(
            EngineConfig(model="fine"),
            restarts=restarts,
            engine="fake_engine:FakeEngine",
            on_restart=lambda: engine.starts.append(1),
        )
        engine.starts = []
        try:
            await asyncio.wait_for(scenario(engine), GUARD)
        finally:
            await engine.close()
        assert not engine.is_alive and not engine.is_restarting

    asyncio.run(whole())


async def last_event(engine, name: str, first: int, count: int = 3):
    params = SamplingParams(max_tokens=count)
    return [event async for event in engine.generate(name, [first], params)][-1]


async def until_alive(engine) -> None:
    while not engine.is_alive:
        assert engine.is_restarting
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "token", [STEP_FAILS, pytest.param(PROCESS_DIES, marks=pytest.mark.exhaustive)]
)
def test_engine_restarts_are_limited(token):
    async def scenario(engine):
        for count in range(2):
            # the same name each time: nothing of the dead engine is left
            event = await last_event(engine, "poison", token)
            assert event.finish_reason == "error" and engine.is_restarting
            assert (await last_event(engine, "early", 1)).finish_reason == "error"
            await until_alive(engine)
            assert len(engine.starts) == count + 1
            assert (await last_event(engine, "late", 1)).finish_reason == "length"
        await last_event(engine, "poison", token)
        await engine.wait_until_dead()
        assert not engine.is_alive and not engine.is_restarting and len(engine.starts) == 2

    run(scenario, restarts=2)


@pytest.mark.exhaustive
def test_restart_limit_resets_after_long_run(monkeypatch):
    monkeypatch.setattr(module, "PROVEN_SECONDS", 0.0)

    async def scenario(engine):
        for _ in range(3):
            await last_event(engine, "poison", PROCESS_DIES)
            await until_alive(engine)
        assert len(engine.starts) == 3

    run(scenario, restarts=1)


@pytest.mark.exhaustive
def test_failed_restart_ends_supervisor(monkeypatch):
    async def scenario(engine):
        monkeypatch.setenv("FAKE_ENGINE_UNUSABLE", "yes")
        os.kill(engine._client._process.pid, signal.SIGKILL)
        await engine.wait_until_dead()
        assert len(engine.starts) == 0

    run(scenario, restarts=2)


@pytest.mark.exhaustive
def test_failed_process_start_does_not_hang(monkeypatch):
    async def scenario(engine):
        async def start(*arguments, **options):
            raise OSError("out of memory")

        monkeypatch.setattr(module.EngineClient, "start", start)
        os.kill(engine._client._process.pid, signal.SIGKILL)
        await engine.wait_until_dead()

    run(scenario, restarts=2)


@pytest.mark.exhaustive
def test_commands_reach_the_engine_and_a_restart_repeats_the_update(tmp_path):
    """A failed command ends nothing; a restarted engine has the last weights, or is none."""
    journal = tmp_path / "journal"

    async def scenario(engine):
        _, problem = await engine.operate(UpdateWeights(folder="/models/wrong"))
        assert "holds another model" in problem and engine.state == EngineState(
            fingerprint="qs_fake"
        )
        _, problem = await engine.operate(UpdateWeights(folder="/models/raises"))
        assert problem == "OverflowError: int too large to convert to float"
        running = asyncio.create_task(last_event(engine, "r", 1, 200))
        await asyncio.sleep(0.02)
        outcome, problem = await engine.operate(UpdateWeights(folder="/models/b", version="7"))
        assert not problem and outcome.state.weight_version == engine.state.weight_version == "7"
        assert running.done() and (await running).finish_reason == "length"
        os.kill(pids(journal)[-1], signal.SIGKILL)
        while engine.is_alive:
            await asyncio.sleep(0.01)
        assert engine.is_restarting
        _, problem = await engine.operate(PauseGeneration())
        assert "exit code" in problem  # it says so
        await until_alive(engine)
        assert engine.state == EngineState(weight_version="7", fingerprint="qs_fake")
        assert journal.read_text().count("uses /models/b\n") == 2

    run(scenario, restarts=1)


def pids(journal: Path) -> list[int]:
    """Process ids of the engines, oldest first."""
    lines = journal.read_text().splitlines()
    return [int(line.removeprefix("pid ")) for line in lines if line.startswith("pid ")]
