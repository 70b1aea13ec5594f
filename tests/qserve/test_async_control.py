"""AsyncLLM's control of a real engine process: new weights under load, and a kill in the middle."""

import asyncio
import os
import signal

import pytest
import torch

from formats.errors import InputError
from formats.weight_digest import digests, total_digest
from qserve import LLM, AsyncLLM, SamplingParams
from qserve.config import EngineConfig
from qserve.engine.control.commands import UpdateWeights
from qserve.engine.control.shared_tensors import PREFIX
from qserve.engine.ipc.supervisor import EngineSupervisor
from tests.qserve.engine.control.new_weights import changed, written

GUARD = 120.0  # seconds, against hanging
PROMPT = list(range(5, 30))
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, detokenize=False)
SETTINGS = {"quantization": "w4a16-auto", "max_num_seqs": 4, "num_gpu_blocks_override": 64}


def fresh(folder) -> list[int]:
    llm = LLM(str(folder), **SETTINGS)
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, GREEDY, use_tqdm=False)
    return output.outputs[0].token_ids


async def tokens(llm: AsyncLLM) -> list[int]:
    outputs = [out async for out in llm.generate({"prompt_token_ids": PROMPT}, GREEDY)]
    assert outputs[-1].outputs[0].finish_reason == "length"
    return outputs[-1].outputs[0].token_ids


@pytest.mark.exhaustive
def test_process_takes_weights_under_load(docs_5m, tmp_path):
    new = changed(docs_5m)
    other = written(new, docs_5m, tmp_path / "new")
    old_tokens, new_tokens = fresh(docs_5m), fresh(other)
    assert old_tokens != new_tokens

    async def main():
        async with AsyncLLM(str(docs_5m), **SETTINGS) as llm:
            load = [asyncio.create_task(tokens(llm)) for _ in range(6)]
            await asyncio.sleep(0.05)
            assert await llm.update_weights(new, version=5) == "5"
            assert {tuple(await each) for each in load} == {tuple(old_tokens)}  # they waited
            assert await tokens(llm) == new_tokens
            assert total_digest(await llm.weight_digests())
            with pytest.raises(InputError, match="surplus"):
                await llm.update_weights({**new, "surplus": torch.zeros(1)})
            assert await llm.weight_version() == "5" and await tokens(llm) == new_tokens
            await llm.sleep(1, mode="keep")
            held = asyncio.create_task(tokens(llm))
            await asyncio.sleep(0.1)
            assert await llm.is_sleeping() and not held.done()
            await llm.collective_rpc("reload_weights")
            await llm.collective_rpc("sleep", kwargs={"level": 2})
            assert await llm.is_sleeping()
            await llm.collective_rpc("wake_up")
            assert not await llm.is_sleeping()
            await llm.wake_up()
            assert await held == old_tokens
            names = set(await llm.weight_digests())
            assert names == set(digests({name: torch.zeros(1) for name in new}))

    asyncio.run(asyncio.wait_for(main(), GUARD))
    assert not any(name.startswith(PREFIX) for name in os.listdir("/dev/shm"))


@pytest.mark.exhaustive
def test_killed_engine_comes_back_with_the_last_weights(docs_5m, tmp_path):
    other = written(changed(docs_5m), docs_5m, tmp_path / "new")
    wanted = fresh(other)

    async def generated(engine, name: str) -> tuple[list[int], str]:
        events = [event async for event in engine.generate(name, PROMPT, GREEDY)]
        return [t for event in events for t in event.token_ids], events[-1].finish_reason

    async def main():
        config = EngineConfig(model=str(docs_5m), **SETTINGS)
        engine = await EngineSupervisor.start(config, restarts=1)
        try:
            _, problem = await engine.operate(UpdateWeights(folder=str(other), version="b"))
            assert problem == ""
            fingerprint = engine.state.fingerprint
            lost = asyncio.create_task(generated(engine, "lost"))
            await asyncio.sleep(0.05)
            os.kill(engine._client._process.pid, signal.SIGKILL)
            assert (await lost)[1] == "error"
            assert engine.is_restarting
            while not engine.is_alive:
                await asyncio.sleep(0.05)
            assert engine.state.weight_version == "b" and not engine.state.is_paused
            assert engine.state.fingerprint == fingerprint
            assert await generated(engine, "next") == (wanted, "length")
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(main(), GUARD))


@pytest.mark.gpu
def test_tensors_on_the_gpu_reach_the_process(docs_5m, tmp_path):
    new = changed(docs_5m)
    settings = {**SETTINGS, "gpu_memory_utilization": 0.2}
    fresh_llm = LLM(str(written(new, docs_5m, tmp_path / "new")), **settings)
    (output,) = fresh_llm.generate({"prompt_token_ids": PROMPT}, GREEDY, use_tqdm=False)
    on_gpu = {name: tensor.cuda() for name, tensor in new.items()}

    async def main():
        async with AsyncLLM(str(docs_5m), **settings) as llm:
            old = await tokens(llm)
            assert await llm.update_weights(on_gpu, version=5) == "5"
            assert await tokens(llm) == output.outputs[0].token_ids != old
            assert await llm.update_weights(iter(on_gpu.items()), version=6) == "6"

    asyncio.run(asyncio.wait_for(main(), GUARD))
