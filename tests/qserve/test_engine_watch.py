"""An engine that fails in a thread, is stopped, or never ends a step: it is seen, always."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from qserve.config import EngineConfig
from qserve.engine.ipc.client import EngineClient, Limits
from qserve.engine.token_event import TokenEvent
from qserve.params.sampling_params import SamplingParams

STEP_HANGS = 103  # of fake_engine
FAKE = "fake_engine:FakeEngine"
ENDLESS = SamplingParams(max_tokens=100_000)
GUARD = 60.0  # seconds, against hanging


@pytest.fixture(autouse=True)
def journal(monkeypatch, tmp_path):
    """Return the messages that the fake engine received, line by line."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("FAKE_ENGINE_JOURNAL", str(tmp_path / "journal"))
    return lambda: (tmp_path / "journal").read_text().splitlines()


def start(limits: Limits | None = None):
    return EngineClient.start(EngineConfig(model="fine"), engine=FAKE, limits=limits)


async def collect(client, request_id, prompt, params) -> list[TokenEvent]:
    return [event async for event in client.generate(request_id, prompt, params)]


async def until(condition) -> None:
    deadline = time.monotonic() + GUARD
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        await asyncio.sleep(0.01)


@pytest.mark.exhaustive
def test_reader_thread_error_ends_engine(monkeypatch):
    """Such as a message that does not fit into memory: every later request would wait for it."""
    monkeypatch.setenv("FAKE_ENGINE_BREAKS_READER", "yes")

    async def scenario():
        client = await start()
        runs = [collect(client, f"r{n}", [1], ENDLESS) for n in range(2)]
        for events in await asyncio.wait_for(asyncio.gather(*runs), GUARD):
            assert "MemoryError: no room" in events[-1].error
        assert not client.is_alive
        assert await asyncio.wait_for(client._process.wait(), GUARD) == 1
        await client.close()

    asyncio.run(scenario())


@pytest.mark.exhaustive
@pytest.mark.parametrize("busy", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_stopped_process_is_killed(journal, busy):
    async def scenario():
        client = await start(Limits(silence=2))
        run = asyncio.create_task(collect(client, "r", [1], ENDLESS)) if busy else None
        if busy:
            await until(lambda: "add r" in journal())
        os.kill(client._process.pid, signal.SIGSTOP)
        cause = await asyncio.wait_for(client.wait_until_dead(), GUARD)
        assert "sent no message for 2 s" in cause
        if run:
            assert cause in (await run)[-1].error
        assert await asyncio.wait_for(client._process.wait(), GUARD) == -signal.SIGKILL
        await client.close()

    asyncio.run(scenario())


@pytest.mark.exhaustive
def test_endless_step_is_killed(journal):
    """The process still gives signs of life: its other threads run."""

    async def scenario():
        client = await start(Limits(silence=20, step=2))
        events = await asyncio.wait_for(collect(client, "r", [STEP_HANGS], ENDLESS), GUARD)
        assert "one step of the engine took more than 2 s" in events[-1].error
        assert await asyncio.wait_for(client._process.wait(), GUARD) == -signal.SIGKILL
        await client.close()

    asyncio.run(scenario())


@pytest.mark.exhaustive
def test_idle_and_busy_engines_are_not_killed(monkeypatch):
    monkeypatch.setattr("qserve.engine.ipc.client.WATCH_SECONDS", 0.01)

    async def scenario():
        client = await start(Limits(silence=3, step=3))
        await asyncio.sleep(3.5)
        assert client.is_alive
        events = await collect(client, "r", [1], SamplingParams(max_tokens=1500))
        assert sum(len(event.token_ids) for event in events) == 1500
        await client.close()

    asyncio.run(scenario())
