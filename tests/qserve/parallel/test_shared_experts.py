"""Engines with requests of their own that share the experts: tokens are those of one engine."""

import asyncio
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.distributed import worker_group
from qserve.engine.engine import CALL_SECONDS, Engine
from qserve.engine.ipc.start_engines import start_engines
from qserve.model.blocks.moe import MoeMlp
from qserve.parallel.expert_exchange import ExpertExchange
from qserve.params.sampling_params import SamplingParams
from tests.qserve.model.variants import edited
from tests.qserve.parallel.in_threads import WAIT_SECONDS, ThreadGroup

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0)
SETTINGS = {"device": "cpu", "num_gpu_blocks_override": 64, "block_size": 8, "max_num_seqs": 4}
MAX_STEPS = 2000


class ThreadConnection:
    """Connection between threads of one process."""

    def __init__(self, meeting, called, rank):
        self.meeting, self.called, self.rank, self.size = meeting, called, rank, meeting.size

    def counts(self, count):
        return self.meeting.exchange(self.rank, count)

    def all_gather(self, x):
        return torch.stack(self.meeting.exchange(self.rank, x))

    def all_to_all(self, x_n):
        return torch.stack([each[self.rank] for each in self.meeting.exchange(self.rank, x_n)])

    def call(self, wave):
        self.called.add(wave)

    def is_called(self, wave):
        return wave in self.called


def alone(folder, prompts, **settings):
    engine = Engine(EngineConfig(model=str(folder), **SETTINGS | settings))
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, GREEDY)
    tokens = [[] for _ in prompts]
    while engine.has_work():
        for event in engine.step():
            tokens[int(event.request_id)] += event.token_ids
    return tokens


def together(folder, size, prompts, engine_of, monkeypatch, during=lambda engine: None):
    """Tokens of each prompt, on engines in threads. `engine_of`: number of a prompt's engine."""
    meeting, called = ThreadGroup(size), set()
    ended = threading.Barrier(size)
    monkeypatch.setattr(
        worker_group,
        "join_experts",
        lambda address, rank, size, device: ExpertExchange(ThreadConnection(meeting, called, rank)),
    )
    tokens = [[] for _ in prompts]
    left = [len(prompts)]

    def one(rank):
        try:
            config = EngineConfig(
                model=str(folder),
                data_parallel_size=size,
                data_parallel_rank=rank,
                data_parallel_address="file:///none",
                enable_expert_parallel=True,
                **SETTINGS,
            )
            engine = Engine(config)
            for number, prompt in enumerate(prompts):
                if engine_of[number] == rank:
                    engine.add_request(str(number), prompt, GREEDY)
            idle = steps = 0
            while left[0] or engine.has_work():
                assert steps < MAX_STEPS and idle * CALL_SECONDS < WAIT_SECONDS
                during(engine)
                if not engine.has_work():  # as the engine's process waits for a message
                    idle += 1
                    time.sleep(CALL_SECONDS)
                    continue
                steps += 1
                for event in engine.step():
                    assert not event.error
                    tokens[int(event.request_id)] += event.token_ids
                    left[0] -= event.finish_reason is not None
            ended.wait(WAIT_SECONDS)
            return engine
        except BaseException:
            meeting.barrier.abort()
            ended.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        engines = [future.result() for future in [pool.submit(one, rank) for rank in range(size)]]
    assert not left[0]
    return tokens, engines


PROMPTS = [list(range(start, start + 9 + 3 * start)) for start in range(3, 9)]


@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("deepseek_v3", 2),
        ("qwen3_moe", 2),
        ("nemotron_h_moe", 2),  # layers that are experts alone
        *(
            pytest.param(family, size, marks=pytest.mark.exhaustive)
            for family, size in (
                *(("deepseek_v3", 4), ("qwen2_moe", 2), ("gpt_oss", 2), ("mixtral", 4)),
                *(("glm4_moe", 2), ("llama4", 2)),
                *(("kimi_linear", 2), ("minimax", 2), ("ling_3", 2)),
            )
        ),
    ],
)
def test_tokens_equal_one_engine(family, size, tiny_model, monkeypatch):
    """Engines have different numbers of requests; the last one has none."""
    folder = tiny_model(family)
    engine_of = [(number * number) % max(1, size - 1) for number in range(len(PROMPTS))]
    tokens, engines = together(folder, size, PROMPTS, engine_of, monkeypatch)
    assert tokens == alone(folder, PROMPTS)
    fingerprints = {engine.operations.fingerprint for engine in engines}
    assert len(fingerprints) == 1, "engines of one model and settings have one fingerprint"
    problems = [
        module.experts.problem
        for engine in engines
        for module in engine.runner.decoder.modules()
        if isinstance(module, MoeMlp)
    ]
    assert max(each.num_experts for each in problems) <= -(-problems[0].routed_experts // size)


def test_fingerprint_covers_experts_of_all_engines(tiny_model, tmp_path, monkeypatch):
    """A changed expert of one engine changes the fingerprint of both."""
    folder = tiny_model("qwen3_moe")

    def change(tensors):
        """One value of the last expert, which the second engine has."""
        name = sorted(name for name in tensors if name.endswith("down_proj.weight"))[-1]
        tensors[name][-1, -1] += 1

    found = set()
    for each in (folder, edited(folder, tmp_path / "other", change)):
        _, engines = together(each, 2, PROMPTS[:1], [0], monkeypatch)
        fingerprints = {engine.operations.fingerprint for engine in engines}
        assert len(fingerprints) == 1
        found |= fingerprints
    assert len(found) == 2


def test_paused_engine_computes_for_the_others(tiny_model, monkeypatch):
    def pause(engine):
        if engine.config.data_parallel_rank == 1 and not engine.is_paused:
            engine.pause("keep")

    folder = tiny_model("deepseek_v3")
    tokens, _ = together(folder, 2, PROMPTS[:2], [0, 0], monkeypatch, pause)
    assert tokens == alone(folder, PROMPTS[:2])


def test_sleep_and_updates_are_refused_while_experts_are_shared(tiny_model, monkeypatch):
    """Sleep, new weights and their digests are refused; requests then still work."""
    refused = []

    def use(engine):
        operations = engine.operations
        calls = (
            lambda: operations.sleep(1),
            lambda: operations.check_sleep(2),
            lambda: operations.stage(folder=engine.config.model),
            operations.weight_digests,
        )
        for call in calls if engine.config.data_parallel_rank == 1 else ():
            with pytest.raises(InputError, match="do not work with --data-parallel-size 2"):
                call()
            refused.append(call)

    folder = tiny_model("deepseek_v3")
    tokens, engines = together(folder, 2, PROMPTS[:1], [0], monkeypatch, use)
    assert tokens == alone(folder, PROMPTS[:1]) and len(refused) >= 4
    engines[1].operations.check_sleep(0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data_parallel_rank": 0}, "add --data-parallel-address"),
        ({"pipeline_parallel_size": 2}, "does not work with --pipeline-parallel-size"),
        (
            {"enable_expert_parallel": False, "data_parallel_address": "file:///x"},
            "is for engines that share experts",
        ),
    ],
)
def test_disagreeing_settings_are_refused(settings, message):
    settings = {"data_parallel_size": 2, "enable_expert_parallel": True} | settings
    with pytest.raises(InputError, match=message):
        EngineConfig(model="m", **settings)


async def tokens_of(engines, name, ids):
    found = []
    async for event in engines.generate(name, ids, GREEDY):
        assert not event.error, event.error
        found += event.token_ids
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [2, 4])
def test_processes_share_experts(size, tiny_model):
    """Over gloo, also after all engines were idle. They end together."""
    folder = tiny_model("deepseek_v3")
    wanted = alone(folder, PROMPTS)
    config = EngineConfig(
        model=str(folder), data_parallel_size=size, enable_expert_parallel=True, **SETTINGS
    )

    async def main():
        engines = await start_engines(config)
        try:
            found = [await tokens_of(engines, "first", PROMPTS[0])]
            await asyncio.sleep(0.1)
            others = (tokens_of(engines, str(n), ids) for n, ids in enumerate(PROMPTS[1:]))
            found += await asyncio.gather(*others)
            os.kill(engines._supervisors[1]._client._process.pid, signal.SIGKILL)
            with pytest.raises(AssertionError, match="ended with exit code|RuntimeError"):
                for number in range(size):
                    await tokens_of(engines, f"last {number}", [number] * 9)
            return found
        finally:
            await engines.close()

    assert asyncio.run(asyncio.wait_for(main(), 120)) == wanted


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_two_gpus_share_experts(written):
    """Over NCCL. Kernels for other numbers of rows round differently, so later tokens may part."""
    folder = written("w4a16-sym-g32", "gptq", "qwen3_moe")
    on_gpu = {"device": "cuda", "dtype": "float16", "max_model_len": 128, "block_size": 16}
    config = EngineConfig(
        model=str(folder),
        data_parallel_size=2,
        enable_expert_parallel=True,
        **SETTINGS | on_gpu,
    )

    async def main():
        engines = await start_engines(config)
        try:
            runs = []
            for turn in range(2):
                run = [tokens_of(engines, f"{turn} {n}", ids) for n, ids in enumerate(PROMPTS)]
                runs.append(await asyncio.gather(*run))
            return runs
        finally:
            await engines.close()

    runs = asyncio.run(asyncio.wait_for(main(), 120))
    wanted = alone(folder, PROMPTS, **on_gpu)
    for run in runs:
        assert all(len(tokens) == 6 for tokens in run)
        assert sum(a[0] == b[0] for a, b in zip(run, wanted, strict=True)) >= 5
