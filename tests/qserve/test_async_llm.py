"""AsyncLLM: requests side by side in one loop, ends of every kind. The engine is the fake one."""

import asyncio
from pathlib import Path

import pytest

from formats.errors import InputError
from qserve import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from qserve.library.outputs import EngineDeadError

REFUSED, PROCESS_DIES = 100, 102  # of fake_engine
GUARD = 120.0  # seconds, against hanging


@pytest.fixture
def journal(monkeypatch, tmp_path):
    """Return the messages that the fake engine received, line by line."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("FAKE_ENGINE_JOURNAL", str(tmp_path / "journal"))
    return lambda: (tmp_path / "journal").read_text().splitlines()


def has(lines, start):
    """Return True if the engine received this; its names of requests end with a number."""
    return any(line.rpartition("-")[0] == start for line in lines)


class FakeLLM(AsyncLLM):
    engine_class = "fake_engine:FakeEngine"


async def last_of(outputs):
    return [output async for output in outputs][-1]


@pytest.mark.exhaustive
def test_async_llm_lifecycle(docs_5m, journal):
    """In one process: a start takes longer than all of these."""

    async def main():
        async with FakeLLM(docs_5m) as llm:
            await llm.check_health()
            await side_by_side(llm)
            await grows(llm)
            await leaves_early(llm)
            await a_name_comes_again(llm)
            await is_aborted(llm)
            await a_search_is_dropped(llm)
            await is_refused(llm)
            await dies(llm)

    async def side_by_side(llm):
        params = [SamplingParams(max_tokens=n, n=2) for n in (3, 40, 1)]
        requests = [llm.generate([7, 200 + i], each, f"side-{i}") for i, each in enumerate(params)]
        found = await asyncio.gather(*map(last_of, requests))
        for i, (output, each) in enumerate(zip(found, params, strict=True)):
            assert output.finished and output.request_id == f"side-{i}"
            for completion in output.outputs:
                assert completion.token_ids == list(range(201 + i, 201 + i + each.max_tokens))

    async def grows(llm):
        counts = []
        async for output in llm.generate("A process", SamplingParams(max_tokens=30)):
            counts.append(len(output.outputs[0].token_ids))
            assert output.prompt == "A process" and output.prompt_token_ids
        assert counts == sorted(set(counts)) and counts[-1] == 30

    async def leaves_early(llm):
        async for output in llm.generate([7, 8], SamplingParams(max_tokens=10_000), "leaver"):
            if output.outputs[0].token_ids:
                break
        await until(lambda: has(journal(), "abort leaver"))

    async def a_name_comes_again(llm):
        """Immediately, while tokens of the earlier request of that name are still arriving."""
        for start in range(200, 230):
            async for output in llm.generate([start], SamplingParams(max_tokens=1000), "again"):
                if output.outputs[0].token_ids:
                    break
            last = await last_of(llm.generate([7000], SamplingParams(max_tokens=5), "again"))
            assert last.outputs[0].token_ids == list(range(7001, 7006))

    async def is_aborted(llm):
        seen = []

        async def read():
            async for output in llm.generate([7, 8], SamplingParams(max_tokens=10**5), "dropped"):
                seen.append(output)

        task = asyncio.create_task(read())
        await until(lambda: seen)
        await llm.abort("dropped")
        await llm.abort("nobody")
        await task
        assert not seen[-1].finished
        await until(lambda: has(journal(), "abort dropped"))

    async def a_search_is_dropped(llm):
        """By its name, and by the end of who waits for it."""
        params = BeamSearchParams(beam_width=2, max_tokens=10**5)
        for drop in ("abort", "cancel"):
            task = asyncio.create_task(llm.beam_search([7, 8], params, f"search-{drop}"))
            await until(lambda drop=drop: has(journal(), f"add search-{drop}"))
            with pytest.raises(InputError, match="is running already"):
                await llm.beam_search([7], params, f"search-{drop}")
            if drop == "abort":
                await llm.abort("search-abort")
                assert (await task).sequences == []
            else:
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await until(lambda drop=drop: has(journal(), f"abort search-{drop}"))
        with pytest.raises(InputError, match="can never run"):
            await llm.beam_search([REFUSED], params)

    async def is_refused(llm):
        with pytest.raises(InputError, match="^request mine: can never run"):
            await last_of(llm.generate([REFUSED], SamplingParams(), "mine"))
        assert (await last_of(llm.generate([7], SamplingParams(max_tokens=2)))).finished

    async def dies(llm):
        others = [
            asyncio.create_task(last_of(llm.generate([7], SamplingParams(max_tokens=10**5))))
            for _ in range(2)
        ]
        with pytest.raises(EngineDeadError):
            await last_of(llm.generate([PROCESS_DIES], SamplingParams(max_tokens=100)))
        for other in others:
            with pytest.raises(EngineDeadError, match="exit code 9"):
                await other
        with pytest.raises(EngineDeadError):
            await llm.check_health()
        with pytest.raises(EngineDeadError):
            await last_of(llm.generate([7], SamplingParams()))

    async def until(holds):
        async with asyncio.timeout(GUARD):
            while not holds():
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), GUARD))


@pytest.mark.exhaustive
def test_beams_equal_offline_llm(docs_5m):
    """The real engine in its process: texts, ids, scores; three requests together, one refused."""
    settings = {"device": "cpu", "max_model_len": 64}
    prompts = ["Once upon a time", [5, 6, 7, 8], "A process is"]
    params = BeamSearchParams(beam_width=3, n=2, max_tokens=6, length_penalty=0.5, logprobs=1)
    want = LLM(docs_5m, **settings).beam_search(prompts, params)

    async def main():
        async with AsyncLLM(docs_5m, **settings) as llm:
            found = await asyncio.gather(*(llm.beam_search(each, params) for each in prompts))
            with pytest.raises(InputError, match="beam_width.*at most"):
                await llm.beam_search(
                    "x", BeamSearchParams(beam_width=16, stop_token_ids=(1, 2, 3, 4, 5))
                )
            return found

    found = asyncio.run(asyncio.wait_for(main(), GUARD))
    assert [len(each.sequences) for each in found] == [2, 2, 2]
    for one, other in zip(found, want, strict=True):
        for ours, theirs in zip(one.sequences, other.sequences, strict=True):
            assert (ours.tokens, ours.text) == (theirs.tokens, theirs.text)
            assert ours.score == pytest.approx(theirs.score, rel=1e-4)
            assert len(ours.logprobs) == 6


def test_dict_settings_are_accepted(docs_5m):
    made = AsyncLLM(
        docs_5m,
        speculative_config={"method": "ngram", "num_speculative_tokens": 2},
        kv_transfer_config={"kv_connector": "folder", "kv_connector_extra_config": {"path": "x"}},
    )
    assert made.config.speculation.num_speculative_tokens == 2
    assert made.config.kv_transfer.extra == {"path": "x"}
    with pytest.raises(InputError, match="max_seqs: is not a setting"):
        AsyncLLM(docs_5m, max_seqs=3)


def test_unloadable_model_raises(docs_5m, journal, monkeypatch):
    monkeypatch.setenv("FAKE_ENGINE_UNUSABLE", "1")

    async def main():
        llm = FakeLLM(docs_5m)
        with pytest.raises(InputError, match="no such architecture"):
            await last_of(llm.generate([7], SamplingParams()))
        await llm.close()

    asyncio.run(asyncio.wait_for(main(), GUARD))
