"""The engine process answers what it is asked, each question by its number."""

import asyncio

import pytest

from qserve.lora.request import LoRARequest
from qserve.sampling_params import SamplingParams
from tests.qserve.test_process import HERE, collect, start, until


@pytest.fixture
def journal(monkeypatch, tmp_path):
    """What the fake engine was told, line by line."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setenv("FAKE_ENGINE_JOURNAL", str(tmp_path / "journal"))
    return lambda: (tmp_path / "journal").read_text().splitlines()


def test_each_load_of_an_adapter_has_its_own_answer(journal, tmp_path):
    """Though they are read at once, end in another order, and one is not waited for any more."""

    async def scenario():
        client = await start()
        paths = {name: tmp_path / name for name in ("left", "good", "bad")}
        loads = {}
        for number, (name, path) in enumerate(paths.items(), start=1):
            load = client.load_adapter(LoRARequest(name, number, str(path)))
            loads[name] = asyncio.create_task(load)
            await until(lambda name=name: f"reads {name}" in journal())
        loads["left"].cancel()
        await asyncio.gather(loads["left"], return_exceptions=True)
        paths["left"].mkdir()
        await until(lambda: "puts left 1" in journal())
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
