"""The engine process and its client: every way to end, and no request left hanging."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import aclosing
from pathlib import Path

import pytest

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.ipc import messages
from qserve.engine.ipc.client import EngineClient, RefusedError
from qserve.engine.report import EngineReport
from qserve.engine.token_event import TokenEvent
from qserve.params.sampling_params import SamplingParams

HERE = Path(__file__).parent
REFUSED, STEP_FAILS, PROCESS_DIES, STEP_HANGS, OUT_OF_MEMORY = (
    100,
    101,
    102,
    103,
    105,
)  # of fake_engine
GUARD = 120.0  # seconds, against hanging
FAKE = "fake_engine:FakeEngine"
ENDLESS = SamplingParams(max_tokens=100_000)
REPORT = EngineReport(
    num_running=2,
    num_waiting=1,
    num_waiting_tokens=900,
    num_pages_used=30,
    num_pages=64,
    num_step_tokens=40,
    num_preempted=1,
    queue_seconds=(0.5, 1.25),
)


@pytest.fixture(autouse=True)
def journal(monkeypatch, tmp_path):
    """Return the messages that the fake engine received, line by line."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setenv("FAKE_ENGINE_JOURNAL", str(tmp_path / "journal"))
    return lambda: (tmp_path / "journal").read_text().splitlines()


def start(model: str = "fine"):
    return EngineClient.start(EngineConfig(model=model), engine=FAKE)


async def collect(client, request_id, prompt, params) -> list[TokenEvent]:
    return [event async for event in client.generate(request_id, prompt, params)]


def tokens(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


async def until(condition, timeout: float = GUARD) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        await asyncio.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_concurrent_requests_and_close_ends_process(journal):
    async def scenario():
        client = await start()
        assert client.is_alive and (client.max_model_len, client.vocab_size) == (2048, 8192)
        runs = [
            collect(client, f"r{n}", [1000 * n], SamplingParams(max_tokens=n + 1)) for n in range(5)
        ]
        for n, events in enumerate(await asyncio.gather(*runs)):
            assert tokens(events) == [1000 * n + 1 + i for i in range(n + 1)]
            assert [e.finish_reason for e in events if e.finish_reason] == ["length"]
        pid = int(journal()[0].split()[1])
        await client.close()
        assert not client.is_alive and not is_running(pid)
        assert (await collect(client, "late", [1], ENDLESS))[-1].finish_reason == "error"

    asyncio.run(scenario())
    assert not any(line.startswith("abort") for line in journal())


@pytest.mark.exhaustive
def test_engine_process_leaves_a_core_to_the_server(monkeypatch, journal):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    async def scenario():
        await (await start()).close()

    asyncio.run(scenario())
    expected = max(1, len(os.sched_getaffinity(0)) - 1)
    assert f"cpu_threads {expected}" in journal()


@pytest.mark.exhaustive
def test_closing_the_generator_early_aborts_in_the_engine(journal):
    async def scenario():
        client = await start()
        async with aclosing(client.generate("gone", [1], ENDLESS)) as events:
            await anext(events)
        await until(lambda: "abort gone" in journal())
        assert len(await collect(client, "gone", [1], SamplingParams(max_tokens=2))) >= 1
        await client.close()

    asyncio.run(scenario())


@pytest.mark.exhaustive
def test_cancelled_task_aborts_in_the_engine(journal):
    async def scenario():
        client = await start()
        task = asyncio.create_task(collect(client, "gone", [1], ENDLESS))
        await until(lambda: "add gone" in journal())
        task.cancel()
        await until(lambda: "abort gone" in journal())
        await client.close()

    asyncio.run(scenario())


@pytest.mark.exhaustive
def test_stop_strings_are_handled_by_client(monkeypatch):
    sent, original = [], messages.encode
    monkeypatch.setattr(messages, "encode", lambda m: sent.append(original(m)) or sent[-1])

    async def scenario():
        client = await start()
        params = SamplingParams(max_tokens=2, stop=["x" * 1024, "y" * 1024, "z" * 1024])
        assert tokens(await collect(client, "r", [1], params)) == [2, 3]
        await client.close()

    asyncio.run(scenario())
    assert sent and max(map(len, sent)) < 2000


def test_engine_receives_client(journal):
    async def scenario():
        client = await start()
        params = SamplingParams(max_tokens=2)
        stream = client.generate("r", [1], params, client="somebody", group="request 7")
        assert tokens([event async for event in stream]) == [2, 3]
        await client.close()

    asyncio.run(scenario())
    assert "r is of somebody, request 7" in journal()


@pytest.mark.exhaustive
def test_slow_reader_gets_everything_in_merged_events():
    async def scenario():
        client = await start()
        generator = client.generate("slow", [1], SamplingParams(max_tokens=500))
        events = [await anext(generator)]
        await collect(client, "fast", [1], SamplingParams(max_tokens=600))
        events += [event async for event in generator]
        assert tokens(events) == list(range(2, 502)) and len(events) <= 3
        assert events[-1].finish_reason == "length"
        await client.close()

    asyncio.run(scenario())


def test_refused_request_raises_and_others_continue():
    async def scenario():
        client = await start()
        other = asyncio.create_task(collect(client, "fine", [1], SamplingParams(max_tokens=50)))
        with pytest.raises(RefusedError, match="request bad: can never run"):
            await collect(client, "bad", [REFUSED], ENDLESS)
        assert len(tokens(await other)) == 50 and client.is_alive
        await client.close()

    asyncio.run(scenario())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("token", "cause"),
    [
        (STEP_FAILS, "RuntimeError: CUDA error: illegal address"),
        (PROCESS_DIES, "exit code 9"),
        (OUT_OF_MEMORY, "MemoryError"),
    ],
)
def test_dead_engine_ends_every_stream(token, cause, capfd):
    async def scenario():
        client = await start()
        runs = [collect(client, f"r{n}", [first], ENDLESS) for n, first in enumerate((1, token, 2))]
        for events in await asyncio.wait_for(asyncio.gather(*runs), GUARD):
            assert events[-1].finish_reason == "error" and cause in events[-1].error
            assert "\n" not in events[-1].error and "0xdead" not in events[-1].error
        assert not client.is_alive
        assert cause in await asyncio.wait_for(client.wait_until_dead(), GUARD)
        await client.close()
        return client._process.returncode

    assert asyncio.run(scenario()) not in (0, None)
    if token == STEP_FAILS:
        assert "Traceback" in capfd.readouterr().err


@pytest.mark.exhaustive
def test_watchers_receive_every_report():
    """Reports that no caller reads are dropped, too; a dead engine holds none."""
    reports, seen = [], []

    async def scenario():
        client = await EngineClient.start(
            EngineConfig(model="fine"), engine=FAKE, watch=reports.append
        )
        assert reports == [EngineReport(num_pages=77)]
        generator = client.generate("r", [1], SamplingParams(max_tokens=30), seen.append)
        first = await anext(generator)
        taken = len(tokens([first]))  # of several events, where this loop was late
        assert tokens(seen)[:taken] == tokens([first])
        assert any(report.num_running for report in reports)
        await until(lambda: len(tokens(seen)) == 30)
        assert seen[-1].finish_reason == "length"
        rest = [event async for event in generator]
        assert tokens([first, *rest]) == tokens(seen) and len(seen) > 1 + len(rest)
        assert reports[-1] == EngineReport(num_pages=77)
        await collect(client, "killer", [STEP_FAILS], ENDLESS)
        assert reports[-2].num_running and reports[-1] == EngineReport()
        await client.close()

    asyncio.run(scenario())


def test_abort_that_leaves_no_work_is_reported(journal):
    reports = []

    async def scenario():
        client = await EngineClient.start(
            EngineConfig(model="fine"), engine=FAKE, watch=reports.append
        )
        async with aclosing(client.generate("gone", [1], ENDLESS)) as events:
            await anext(events)
        await until(lambda: reports[-1] == EngineReport(num_pages=77))
        await client.close()

    asyncio.run(scenario())
    assert "abort gone" in journal()


def test_finished_output_survives_engine_death():
    async def scenario():
        client = await start()
        generator = client.generate("first", [1], SamplingParams(max_tokens=3))
        events = [await anext(generator)]
        await collect(client, "other", [1], SamplingParams(max_tokens=20))
        await collect(client, "killer", [STEP_FAILS], ENDLESS)
        events += [event async for event in generator]
        assert events[-1].finish_reason == "length"
        await client.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("unusable", "unusable/config.json: no such architecture (use another)"),
        ("broken", "broken: RuntimeError: out of memory"),
        ("dies", "ended with exit code 7 while it was starting (see its messages above)"),
        ("killed", "exit code -9 while it was starting (the system probably killed it"),
    ],
)
def test_failed_start_raises_one_line_and_leaves_no_process(model, message):
    with pytest.raises(InputError) as caught:
        asyncio.run(start(model))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_cancelled_start_leaves_no_process():
    async def scenario():
        before = children()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(start("slow"), 1.5)
        assert children() == before

    def children() -> set[str]:
        return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())

    asyncio.run(scenario())


def test_unresponsive_engine_is_killed(monkeypatch, journal):
    monkeypatch.setattr("qserve.engine.ipc.client.EXIT_TIMEOUT", 0.3)

    async def scenario():
        client = await start()
        asyncio.create_task(collect(client, "r", [STEP_HANGS], ENDLESS))
        await until(lambda: "add r" in journal())
        pid = int(journal()[0].split()[1])
        os.kill(pid, signal.SIGSTOP)
        await client.close()
        assert not is_running(pid)

    asyncio.run(scenario())


def raw_process() -> tuple[subprocess.Popen, socket.socket]:
    ours, theirs = socket.socketpair()
    environment = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parents[1]}"}
    command = ["-m", "qserve.engine.ipc.process", f"--fd={theirs.fileno()}", f"--engine={FAKE}"]
    with theirs:
        process = subprocess.Popen(
            [sys.executable, *command], pass_fds=(theirs.fileno(),), env=environment
        )
    return process, ours


def handles_sigterm(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (caught,) = [line.split()[1] for line in lines if line.startswith("SigCgt")]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("model", ["slow", pytest.param("fine", marks=pytest.mark.exhaustive)])
def test_sigterm_exits_silently(model, capfd):
    """It ends by a normal exit, in its load or idle; a second signal does not interrupt that."""
    process, connection = raw_process()
    config = EngineConfig(model=model, record_expert_loads="loads.json")
    with process, connection:
        connection.sendall(messages.encode(messages.Start(config=config)))
        if model == "fine":
            assert isinstance(messages.receive(connection, messages.FromEngine), messages.Ready)
        else:
            while not handles_sigterm(process.pid):
                time.sleep(0.01)
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.01)
        code = process.wait(20)
    err = capfd.readouterr().err
    assert "Traceback" not in err and "ClientGone" not in err and "failed to start" not in err
    assert code == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("when", ["before start", "idle", "busy", "after garbage"])
def test_process_ends_when_the_client_vanishes(when):
    process, connection = raw_process()
    with process, connection:
        if when != "before start":
            connection.sendall(messages.encode(messages.Start(config=EngineConfig(model="m"))))
            assert isinstance(messages.receive(connection, messages.FromEngine), messages.Ready)
        if when == "busy":
            add = messages.Add(request_id="r", prompt_token_ids=[1], params=ENDLESS, sent=0.0)
            connection.sendall(messages.encode(add))
            messages.receive(connection, messages.FromEngine)
        if when == "after garbage":
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        else:
            connection.close()
        assert process.wait(timeout=GUARD) == 0


@pytest.mark.exhaustive
def test_process_that_is_stuck_in_a_step_ends_when_the_client_vanishes(journal):
    process, connection = raw_process()
    with process, connection:
        connection.sendall(messages.encode(messages.Start(config=EngineConfig(model="m"))))
        messages.receive(connection, messages.FromEngine)
        add = messages.Add(request_id="r", prompt_token_ids=[STEP_HANGS], params=ENDLESS, sent=0.0)
        connection.sendall(messages.encode(add))
        while "add r" not in journal():
            time.sleep(0.01)
        time.sleep(0.1)
        connection.close()
        assert process.wait(timeout=GUARD) == 1


def test_engine_process_imports_own_package_from_any_directory(monkeypatch, tmp_path):
    (tmp_path / "formats").mkdir()
    (tmp_path / "formats" / "__init__.py").write_text("raise ImportError('shadowed')")
    monkeypatch.chdir(tmp_path)

    async def scenario():
        client = await start()
        await client.close()

    asyncio.run(scenario())
