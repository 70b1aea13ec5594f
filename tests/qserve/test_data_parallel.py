"""Several engines of one model: where requests go, what happens to each when one dies."""

import asyncio
import os
import signal
import subprocess
from array import array
from pathlib import Path

import pytest
import torch

from formats.errors import InputError
from qserve import LLM, AsyncLLM, SamplingParams
from qserve.config import EngineConfig
from qserve.engine.control.commands import (
    AbortAll,
    GetDigests,
    JoinWeightGroup,
    Outcome,
    PauseGeneration,
    ResumeGeneration,
    UpdateWeights,
)
from qserve.engine.ipc import data_parallel
from qserve.engine.ipc import supervisor as supervisor_module
from qserve.engine.ipc.data_parallel import DataParallelEngines, sum_of_reports
from qserve.engine.ipc.start_engines import start_engines
from qserve.engine.report import EngineReport
from qserve.engine.token_event import TokenEvent
from qserve.lora.request import LoRARequest
from qserve.params.request_options import RequestOptions

GUARD = 120  # seconds, against hanging
TOKENS = data_parallel.TOKENS


class FakeSupervisor:
    """An engine that answers when `go` is set."""

    def __init__(self, rank, watch) -> None:
        self.rank, self.watch = rank, watch
        self.is_alive, self.is_restarting, self.problem = True, False, ""
        self.max_model_len = 100 - rank
        self.ids, self.commands = [], []
        self.go = asyncio.Event()
        self.state = Outcome().state

    async def generate(self, request_id, ids, *_):
        self.ids.append(request_id)
        await self.go.wait()
        for reason in (None, "stop"):
            yield TokenEvent(request_id=request_id, token_ids=(self.rank,), finish_reason=reason)

    async def operate(self, command):
        self.commands.append(command)
        return Outcome(num_requests=1, total_digest=self.digest), self.problem

    digest = "d"

    async def close(self):
        self.is_alive = False


class Group:
    """The engines and what they are made of."""

    def __init__(self, size) -> None:
        self.reports = []
        self.engines = DataParallelEngines(self.reports.append)
        self.made = [
            FakeSupervisor(rank, lambda report, rank=rank: self.engines._take_report(rank, report))
            for rank in range(size)
        ]
        self.engines._engines = [data_parallel._Engine(each) for each in self.made]
        self._tasks = []

    async def send(self, name, ids, options=RequestOptions()):  # noqa: B008  # immutable
        """Send a request. Returns the rank of its engine."""

        async def run():
            return [e async for e in self.engines.generate(name, ids, None, options=options)]

        self._tasks.append(asyncio.create_task(run()))
        await asyncio.sleep(0)
        (rank,) = [each.rank for each in self.made if name in each.ids]
        return rank

    async def finish(self):
        for each in self.made:
            each.go.set()
        ends = [(await task)[-1].finish_reason for task in self._tasks]
        assert set(ends) == {"stop"}
        assert [(e.num_requests, e.num_tokens) for e in self.engines._engines] == [
            (0, 0) for _ in self.made
        ]
        for each in self.made:
            each.go.clear()
        self._tasks.clear()


def prompt(seed, blocks=10):
    return list(range(1000 * seed, 1000 * seed + blocks * TOKENS))


def test_prompts_are_routed_to_engine_with_prefix():
    async def main():
        group = Group(3)
        first = [await group.send(f"first {seed}", prompt(seed)) for seed in range(3)]
        assert sorted(first) == [0, 1, 2]
        await group.finish()
        for turn in range(3):
            for seed in (2, 0, 1):
                longer = prompt(seed) + prompt(50 + turn, 1)
                assert await group.send(f"{turn} {seed}", longer) == first[seed]
            await group.finish()

    asyncio.run(main())


def test_load_counts_against_prefix_match():
    async def main():
        group = Group(2)
        assert await group.send("0", prompt(0)) == 0
        await group.finish()
        # 10 blocks of the prompt cost as much as 10 requests that run
        places = [await group.send(str(n), prompt(0)) for n in range(1, 14)]
        assert places[:11] == [0] * 11 and 1 in places[11:]

    asyncio.run(main())


def test_waiting_prompts_count_by_their_tokens():
    async def main():
        group = Group(2)
        assert await group.send("long", prompt(1, 40)) == 0
        assert {await group.send(f"short {n}", prompt(2 + n, 2)) for n in range(5)} == {1}
        group.made[0].go.set()
        await asyncio.sleep(0.01)  # the long prompt is computed, and its request ends
        assert await group.send("next", prompt(20, 2)) == 0

    asyncio.run(main())


def test_salts_and_adapters_separate_prefixes():
    async def main():
        group = Group(2)
        lora = RequestOptions(lora=LoRARequest("one", 1, "folder"))
        assert await group.send("plain", prompt(0)) == 0
        assert await group.send("salted", prompt(0), RequestOptions(cache_salt="key")) == 1
        await group.finish()
        assert await group.send("adapter", prompt(0), lora) == 0
        assert await group.send("salted again", prompt(0), RequestOptions(cache_salt="key")) == 1
        await group.finish()

    asyncio.run(main())


def test_dead_engine_gets_no_requests():
    async def main():
        group = Group(2)
        assert await group.send("0", prompt(0)) == 0
        await group.finish()
        group.made[0].is_alive = False
        assert group.engines.is_alive and not group.engines.is_restarting
        assert await group.send("1", prompt(0)) == 1
        await group.finish()
        group.made[1].is_alive, group.made[1].is_restarting = False, True
        assert not group.engines.is_alive and group.engines.is_restarting

    asyncio.run(main())


def test_abandoned_request_reduces_load():
    async def main():
        group = Group(2)
        events = group.engines.generate("0", prompt(0), None)
        waiting = asyncio.create_task(anext(events))
        await asyncio.sleep(0)
        assert group.engines._engines[0].num_requests == 1
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await events.aclose()
        assert [e.num_requests for e in group.engines._engines] == [0, 0]
        assert [e.num_tokens for e in group.engines._engines] == [0, 0]

    asyncio.run(main())


def test_commands_reach_all_engines_with_consecutive_ranks():
    async def main():
        group = Group(3)
        outcome, problem = await group.engines.operate(AbortAll())
        assert (outcome.num_requests, problem) == (3, "")
        join = JoinWeightGroup(
            name="g", address="a", port=1, rank=1, world_size=4, backend="gloo", timeout=1.0
        )
        await group.engines.operate(join)
        assert [each.commands[-1].rank for each in group.made] == [1, 2, 3]
        group.made[1].problem = "no memory"
        assert (await group.engines.operate(AbortAll()))[1] == "engine 1: no memory"
        assert all(each.is_alive for each in group.made)
        group.made[2].digest = "other"
        _, problem = await group.engines.operate(GetDigests())
        assert "different weights" in problem

    asyncio.run(main())


def test_engine_with_failed_update_is_closed():
    async def main():
        group = Group(2)

        async def operate(command):
            state = Outcome().state
            group.made[0].state = type(state)(weight_version="7")
            return Outcome(state=group.made[0].state), ""

        group.made[0].operate = operate
        group.made[1].problem = "no memory"
        outcome, problem = await group.engines.operate(UpdateWeights(folder="new"))
        assert (outcome.state.weight_version, problem) == ("7", "engine 1: no memory")
        assert [each.is_alive for each in group.made] == [True, False]
        assert group.engines.state.weight_version == "7"

    asyncio.run(main())


def test_reports_are_summed():
    group = Group(2)
    first = EngineReport(num_running=3, num_pages=50, num_step_tokens=9, running_adapters=("a",))
    second = EngineReport(num_running=1, num_pages=60, num_step_tokens=2, running_adapters=("b",))
    group.made[0].watch(first)
    group.made[1].watch(second)
    assert group.reports[0] == first
    last = group.reports[1]
    assert (last.num_running, last.num_pages, last.num_step_tokens) == (4, 110, 2)
    assert last.running_adapters == ("a", "b")
    group.made[0].watch(EngineReport())  # it has died
    assert (group.reports[2].num_running, group.reports[2].num_pages) == (1, 60)
    assert sum_of_reports(second, [second]) == second


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"data_parallel_size": 2, "data_parallel_rank": 2}, "expected less than.*0 to 1"),
        (
            {"data_parallel_size": 2, "distributed_executor_backend": "ray"},
            "does not work with.*--replicas",
        ),
    ],
)
def test_disagreeing_settings_are_refused(settings, text):
    with pytest.raises(InputError, match=text):
        EngineConfig(model="m", **settings)


def test_llm_runs_one_engine(tiny_model):
    with pytest.raises(InputError, match="LLM runs one engine.*AsyncLLM"):
        LLM(tiny_model("llama"), data_parallel_size=2)
    llm = LLM(tiny_model("llama"), data_parallel_size=2, data_parallel_rank=1, device="cpu")
    (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2, detokenize=False))
    assert len(output.outputs[0].token_ids) == 2


@pytest.fixture
def fake_processes(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("FAKE_ENGINE_JOURNAL", str(tmp_path / "journal"))
    monkeypatch.setattr(supervisor_module, "PAUSE_SECONDS", 0.01)
    return tmp_path / "journal"


def test_engine_start_failure_is_reported_and_others_stop(fake_processes):
    config = EngineConfig(model="unusable", data_parallel_size=2)
    with pytest.raises(InputError, match="engine 0: unusable/config.json"):
        asyncio.run(start_engines(config, engine="fake_engine:FakeEngine"))


def test_killed_engine_process_restarts(fake_processes, caplog):
    async def main():
        config = EngineConfig(model="fine", data_parallel_size=2)
        restarts = []
        engines = await start_engines(
            config,
            engine="fake_engine:FakeEngine",
            restarts=1,
            on_restart=lambda: restarts.append(1),
        )
        pids = [int(line[4:]) for line in journal() if line.startswith("pid ")]
        assert isinstance(engines, DataParallelEngines) and len(set(pids)) == 2
        params = SamplingParams(max_tokens=4)

        async def run(name, ids):
            return [each async for each in engines.generate(name, ids, params)][-1]

        try:
            ends = await asyncio.gather(*(run(str(n), [n + 1] * 70) for n in range(6)))
            assert {each.finish_reason for each in ends} == {"length"}
            await engines.operate(PauseGeneration())
            assert engines.state.is_paused
            await engines.operate(ResumeGeneration())
            chosen = engines._engines[0].supervisor
            endless = SamplingParams(max_tokens=10**6)
            running = chosen.generate("lost", [1] * 70, endless)
            await anext(running)
            os.kill(pids[0], signal.SIGKILL)
            last = [each async for each in running][-1]
            assert (last.finish_reason, last.has_lost_engine) == ("error", True)
            while engines._supervisors[0].is_alive:
                await asyncio.sleep(0.01)
            assert engines.is_alive
            assert (await run("meanwhile", [1] * 70)).finish_reason == "length"
            while not restarts:
                await asyncio.sleep(0.01)
            assert engines._supervisors[0].is_alive
            assert "Engine 0 died: the engine process ended with exit code -9" in caplog.messages
            assert "Engine 0 restarts; 0 more restarts are left" in caplog.messages
        finally:
            await engines.close()
        assert not engines.is_alive

    def journal():
        return fake_processes.read_text().splitlines()

    asyncio.run(asyncio.wait_for(main(), GUARD))


@pytest.mark.exhaustive
def test_tokens_equal_one_engine(docs_5m):
    prompts = [list(range(5 + n, 40 + 7 * n)) for n in range(8)]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False)
    settings = {"num_gpu_blocks_override": 64, "device": "cpu"}
    wanted = LLM(str(docs_5m), **settings).generate(prompts, params, use_tqdm=False)

    async def main():
        async with AsyncLLM(str(docs_5m), data_parallel_size=2, **settings) as llm:

            async def tokens(ids):
                outputs = llm.generate({"prompt_token_ids": ids}, params)
                return [each async for each in outputs][-1].outputs[0].token_ids

            return await asyncio.gather(*map(tokens, prompts))

    found = asyncio.run(asyncio.wait_for(main(), GUARD))
    assert found == [each.outputs[0].token_ids for each in wanted]


def gpus_of_children() -> set[str]:
    """Return the UUIDs of the GPUs that child processes use."""
    command = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    uses = dict(line.split(", ") for line in lines)
    return {gpu for pid, gpu in uses.items() if f"\nPPid:\t{os.getpid()}\n" in status_of(pid)}


def status_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended
        return ""


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_engines_use_separate_gpus_and_equal_one_engine(docs_5m):
    rounds = [[list(range(5 + n, 90 + n)), list(range(300 + n, 345 + n))] for n in range(3)]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False)
    settings = {"num_gpu_blocks_override": 256, "device": "cuda", "max_model_len": 256}
    alone = LLM(str(docs_5m), **settings)
    wanted = [
        [alone.generate([ids], params, use_tqdm=False)[0].outputs[0].token_ids for ids in two]
        for two in rounds
    ]
    alone.close()

    async def main():
        async with AsyncLLM(str(docs_5m), data_parallel_size=2, **settings) as llm:
            assert len(gpus_of_children()) == 2

            async def tokens(ids):
                outputs = llm.generate({"prompt_token_ids": ids}, params)
                return [each async for each in outputs][-1].outputs[0].token_ids

            return [await asyncio.gather(*map(tokens, two)) for two in rounds]  # one an engine

    assert asyncio.run(asyncio.wait_for(main(), GUARD)) == wanted


def test_blocks_of_the_table_are_blocks_of_tokens():
    assert len(array("i", range(TOKENS)).tobytes()) == data_parallel.BLOCK
