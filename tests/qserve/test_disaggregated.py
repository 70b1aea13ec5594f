"""Engines that compute prompts and engines that decode, in one server."""

import asyncio
import contextlib
import os
import signal
from dataclasses import replace

import pytest
import torch

from formats.errors import InputError
from qserve import LLM, AsyncLLM, SamplingParams
from qserve.config import EngineConfig
from qserve.engine.engine import Engine
from qserve.engine.ipc import data_parallel
from qserve.engine.ipc.client import RefusedError
from qserve.engine.ipc.disaggregated import DisaggregatedEngines
from qserve.engine.token_event import TokenEvent
from qserve.params.request_options import RequestOptions

GUARD = 120  # seconds, against hanging
PROMPT = list(range(1000, 1400))
PARAMS = SamplingParams(max_tokens=9)


class FakeSupervisor:
    """Engine that answers when `go` is set, and records calls."""

    def __init__(self, problem="") -> None:
        self.is_alive, self.problem = True, problem
        self.requests, self.stopped, self.num_closed = {}, [], 0
        self.go = asyncio.Event()

    async def generate(self, request_id, ids, params, watch, client, group, options):
        self.requests[request_id] = params, options
        try:
            if self.problem == "refuses":
                raise RefusedError("request", "is too long")
            await self.go.wait()
            if self.problem == "dies":
                yield TokenEvent.failure(request_id, "the engine died")
                return
            for reason in (None, "stop"):
                yield TokenEvent(request_id=request_id, token_ids=(1,), finish_reason=reason)
        finally:
            self.num_closed += 1

    async def stop_waiting(self, request_id):
        self.stopped.append(request_id)


class Group:
    """One engine that decodes, and others that compute prompts."""

    def __init__(self, *problems) -> None:
        self.decoder, self.prefill = FakeSupervisor(), [FakeSupervisor(each) for each in problems]
        self.engines = DisaggregatedEngines(lambda report: None)
        self.engines._min_tokens = 100
        self.engines._engines = [
            data_parallel._Engine(each) for each in (self.decoder, *self.prefill)
        ]
        self.tasks = []

    async def send(self, name, ids=PROMPT, params=PARAMS, options=RequestOptions()):  # noqa: B008  # immutable
        async def run():
            return [e async for e in self.engines.generate(name, ids, params, options=options)]

        self.tasks.append(asyncio.create_task(run()))
        await asyncio.sleep(0.01)
        return self.tasks[-1]


def test_both_engines_get_a_request_at_the_same_time():
    async def main():
        group = Group("")
        salted = RequestOptions(cache_salt="key", priority=3)
        task = await group.send("a", options=salted)
        (params, options) = group.prefill[0].requests["a"]
        assert params.max_tokens == 1 and options == replace(salted, is_for_another=True)
        (params, options) = group.decoder.requests["a"]
        assert params == PARAMS and options == replace(salted, awaits_pages=True)
        assert not group.decoder.stopped
        group.prefill[0].go.set()
        await asyncio.sleep(0.01)
        assert group.decoder.stopped == ["a"] and not task.done()
        group.decoder.go.set()
        assert (await task)[-1].finish_reason == "stop"
        assert [e.num_requests for e in group.engines._engines] == [0, 0]

    asyncio.run(main())


def test_short_or_cached_prompts_stay_on_decode_engine():
    async def main():
        group = Group("")
        group.prefill[0].go.set()
        await group.send("long")
        group.decoder.go.set()
        await group.send("again")  # its beginning is known to be cached
        await group.send("short", PROMPT[:99])
        logprobs = SamplingParams(prompt_logprobs=1)
        await group.send("logprobs", PROMPT[::-1], logprobs)
        assert list(group.prefill[0].requests) == ["long"]
        awaiting = [name for name, (_, h) in group.decoder.requests.items() if h.awaits_pages]
        assert awaiting == ["long"]

    asyncio.run(main())


@pytest.mark.parametrize("problem", ["refuses", "dies"])
def test_failed_prefill_engine_falls_back_to_decode_engine(problem, caplog):
    async def main():
        group = Group(problem)
        task = await group.send("a")
        group.prefill[0].go.set()
        await asyncio.sleep(0.01)
        assert group.decoder.stopped == ["a"]
        group.decoder.go.set()
        assert (await task)[-1].finish_reason == "stop"

    asyncio.run(main())
    assert "Request a: remote prefill failed" in caplog.text


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_paused_engine_refuses_remote_prompts_and_keeps_its_own(mode, docs_5m):
    """The engine that decodes would wait for pages until the pause ends."""
    config = {"num_gpu_blocks_override": 32, "max_model_len": 64, "device": "cpu"}
    engine = Engine(EngineConfig(model=str(docs_5m), **config))
    try:
        engine.pause(mode)
        with pytest.raises(InputError, match="computes prompts: is paused or asleep"):
            engine.add_request("0", [5, 6, 7], PARAMS, options=RequestOptions(is_for_another=True))
        engine.add_request("0", [5, 6, 7], PARAMS)
        assert not engine.step()
        engine.resume()
        engine.add_request("1", [5, 6, 7], PARAMS, options=RequestOptions(is_for_another=True))
        ended = set()
        while engine.has_work():
            ended |= {event.request_id for event in engine.step() if event.finish_reason}
        assert ended == {"0", "1"}
    finally:
        engine.close()


def test_dead_engine_gets_no_prompts():
    async def main():
        group = Group("", "")
        group.prefill[0].is_alive = False
        await group.send("a")
        assert not group.prefill[0].requests and group.prefill[1].requests
        group.prefill[1].is_alive = False
        await group.send("b", PROMPT[::-1])
        assert not group.decoder.requests["b"][1].awaits_pages
        assert group.engines.is_alive
        group.decoder.is_alive = False
        assert not group.engines.is_alive
        for task in group.tasks:
            task.cancel()

    asyncio.run(main())


def test_disconnect_aborts_on_both_engines():
    async def main():
        group = Group("")
        task = await group.send("a")
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.01)
        assert group.decoder.num_closed == group.prefill[0].num_closed == 1

    asyncio.run(main())


def test_engines_use_separate_gpus():
    config = EngineConfig(
        model="m", tensor_parallel_size=2, data_parallel_size=2, prefill_engines=3
    )
    config = DisaggregatedEngines._configs(config)
    assert [each.first_device for each in config] == [0, 2, 4, 6, 8]
    extras = [each.kv_transfer.extra for each in config]
    assert all(each == extras[0] and each["patience_s"] == 600 for each in extras)
    assert [each.kv_transfer.role for each in config] == ["kv_consumer"] * 2 + ["kv_producer"] * 3
    config = EngineConfig(
        model="m",
        gpu_offset=1,
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        prefill_engines=2,
        prefill_tensor_parallel_size=1,
    )
    config = DisaggregatedEngines._configs(config)
    assert [(each.first_device, each.num_ranks) for each in config] == [(1, 2), (3, 1), (4, 1)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefill_tensor_parallel_size": 2}, "requires --prefill-engines"),
        ({"prefill_engines": 1, "data_parallel_rank": 0}, "--data-parallel-rank"),
        ({"prefill_engines": 1, "pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        (
            {"prefill_engines": 1, "prefill_context_parallel_size": 2},
            "--prefill-engines: does not work with --prefill-context-parallel-size",
        ),
        ({"prefill_engines": 1, "enable_prefix_caching": False}, "requires the prefix cache"),
        (
            {"prefill_engines": 1, "kv_transfer_config": '{"kv_connector": "peer"}'},
            "does not work with --kv-transfer-config",
        ),
    ],
)
def test_disagreeing_settings_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        EngineConfig(model="m", **settings)


def test_unsendable_model_error_names_flag(tiny_model):
    config = EngineConfig(model=str(tiny_model("mamba")), prefill_engines=1, device="cpu")
    for each in DisaggregatedEngines._configs(config):
        with pytest.raises(InputError, match="--prefill-engines: does not work with MambaForC"):
            Engine(each)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["", "qwen3_next"])
def test_killed_engine_and_its_restart(family, docs_5m, tiny_model):
    """Tokens are those of one engine, while the engine for prompts lives and after its death."""
    settings = {"num_gpu_blocks_override": 64, "device": "cpu", "max_num_batched_tokens": 64}
    settings["model"] = str(tiny_model(family) if family else docs_5m)
    prompts = [list(range(5 + n, 150 + n)) for n in range(6)]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False)

    async def tokens(llm, ids):
        outputs = llm.generate({"prompt_token_ids": ids}, params)
        last = [each async for each in outputs][-1]
        return list(last.outputs[0].token_ids), last.num_cached_tokens

    async def main():
        async with AsyncLLM(**settings) as llm:
            wanted = [(await tokens(llm, ids))[0] for ids in prompts]
        async with AsyncLLM(prefill_engines=1, prefill_engine_min_tokens=16, **settings) as llm:
            found = await asyncio.gather(*(tokens(llm, ids) for ids in prompts[:3]))
            assert found == [(each, 144) for each in wanted[:3]]
            _, engines = await llm._ready()
            prefill = engines._supervisors[1]
            os.kill(prefill._client._process.pid, signal.SIGKILL)
            found = await asyncio.gather(*(tokens(llm, ids) for ids in prompts[3:]))
            assert [each for each, _ in found] == wanted[3:]
            folder = engines._folder
            assert folder.exists()
        assert not folder.exists()

    asyncio.run(asyncio.wait_for(main(), GUARD))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_pages_pass_from_one_gpu_to_the_other(quantized_5m):
    """Prompts of several steps, with and without CUDA graphs; then the engine for them dies."""
    settings = {"num_gpu_blocks_override": 1024, "device": "cuda", "dtype": "float16"}
    settings |= {"max_num_batched_tokens": 1536, "max_model_len": 2048}
    prompts = [[5 + n, *range(10, 1800)] for n in range(4)] + [[5, *range(30, 430)]]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False)
    alone = LLM(str(quantized_5m), **settings)
    given = [{"prompt_token_ids": ids} for ids in prompts]
    wanted = [
        alone.generate([each], params, use_tqdm=False)[0].outputs[0].token_ids for each in given
    ]
    alone.close()

    async def run(llm, each):
        last = [found async for found in llm.generate(each, params)][-1]
        return list(last.outputs[0].token_ids), last.num_cached_tokens

    async def main():
        async with AsyncLLM(str(quantized_5m), prefill_engines=1, **settings) as llm:
            found = await asyncio.gather(*(run(llm, each) for each in given))
            _, engines = await llm._ready()
            os.kill(engines._supervisors[1]._client._process.pid, signal.SIGKILL)
            changed = {"prompt_token_ids": [9, *prompts[0][1:]]}
            tokens, cached = await run(llm, changed)
            assert len(tokens) == 12 and cached == 0
            return found

    found = asyncio.run(asyncio.wait_for(main(), GUARD))
    assert [cached for _, cached in found] == [1776] * 4 + [400]
    for (tokens, _), other in zip(found, wanted, strict=True):
        assert tokens[0] == other[0]  # kernels for fewer rows round differently: ties may part
