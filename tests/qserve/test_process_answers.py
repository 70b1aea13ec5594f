"""The engine process answers every question, by its number."""

import asyncio

import pytest

from qserve.lora.request import LoRARequest
from qserve.params.sampling_params import SamplingParams
from qserve.profile.profiler_config import ProfilerConfig
from tests.qserve.test_process import HERE, collect, start, until


@pytest.fixture
def journal(monkeypatch, tmp_path):
    """Return the messages that the fake engine received, line by line."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setenv("FAKE_ENGINE_JOURNAL", str(tmp_path / "journal"))
    return lambda: (tmp_path / "journal").read_text().splitlines()


@pytest.mark.exhaustive
def test_every_adapter_load_gets_its_reply(journal, tmp_path):
    """Though two are read together and end in another order."""

    async def scenario():
        client = await start()
        paths = {name: tmp_path / name for name in ("good", "bad")}
        loads = {}
        for number, (name, path) in enumerate(paths.items(), start=1):
            load = client.load_adapter(LoRARequest(name, number, str(path)))
            loads[name] = asyncio.create_task(load)
            await until(lambda name=name: f"reads {name}" in journal())
        await collect(client, "r", [1], SamplingParams(max_tokens=3))
        assert not loads["good"].done() and not loads["bad"].done()
        paths["bad"].write_text("")
        assert "is no adapter" in await loads["bad"]
        assert not loads["good"].done()
        paths["good"].mkdir()
        assert await loads["good"] == ""
        late = asyncio.create_task(client.load_adapter(LoRARequest("x", 9, str(tmp_path / "x"))))
        await until(lambda: "reads x" in journal())
        await client.close()
        assert await late == await client.load_adapter(LoRARequest("y", 10, "y")) != ""

    asyncio.run(scenario())


@pytest.mark.exhaustive
def test_abandoned_adapter_load_does_not_block_next(journal, tmp_path):
    async def scenario():
        client = await start()
        loads = [
            asyncio.create_task(client.load_adapter(LoRARequest(name, n, str(tmp_path / name))))
            for n, name in enumerate(("first", "second", "third", "fourth"), start=1)
        ]
        await until(lambda: {"reads first", "reads second"} <= set(journal()))
        assert "reads third" not in journal(), "loads take turns"
        # The third first: a free turn would be its own.
        for load in (loads[2], loads[0], loads[1]):
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
        (tmp_path / "fourth").mkdir()
        assert await loads[3] == ""
        await until(lambda: {"leaves first", "leaves second"} <= set(journal()))
        assert "reads third" not in journal()
        await client.close()

    asyncio.run(scenario())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["raises", "refused"])
def test_adapter_load_error_fails_only_that_load(journal, tmp_path, name):
    async def scenario():
        client = await start()
        (tmp_path / name).mkdir()
        problem = await client.load_adapter(LoRARequest(name, 1, str(tmp_path / name)))
        assert "float" in problem and "Traceback" not in problem
        assert len(await collect(client, "r", [1], SamplingParams(max_tokens=3))) > 0
        assert client.is_alive
        await client.close()

    asyncio.run(scenario())


@pytest.mark.exhaustive
def test_invalid_request_fails_alone(journal):
    async def scenario():
        client = await start()
        events = await collect(client, "bad", [107], SamplingParams(max_tokens=3))
        assert [event.finish_reason for event in events] == ["error"]
        assert "int too large" in events[0].error and not events[0].is_asked_for
        assert (await collect(client, "r", [1], SamplingParams(max_tokens=3)))[-1].error == ""
        assert client.is_alive and "abort bad" in journal()
        await client.close()

    asyncio.run(scenario())


@pytest.mark.exhaustive
def test_profile_error_is_returned(journal):
    async def scenario():
        client = await start()
        problem = await client.profile(ProfilerConfig())
        assert problem == "RuntimeError: the profiler cannot start"
        assert await client.profile(None) == "" and client.is_alive
        await client.close()

    asyncio.run(scenario())
