"""StepTimer: replays single steps on an engine's model and measures their time.

`Replay` (engine/runner/worker.py) runs the step. With several ranks every rank runs it. The
leader's time counts, because each all-reduce waits for all ranks. KV pages contain zeros. The
weights and keys of a small model stay in the L2 cache between replays, so its measured times are
shorter than in reality.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from formats.errors import InputError
from qserve.bench.steps.step_case import StepCase
from qserve.engine.engine import Engine
from qserve.engine.request import Request
from qserve.engine.scheduling.plan import Chunk, StepPlan
from qserve.engine.step.request_rows import RequestRows
from qserve.engine.step.step_input import StepInput
from qserve.params.sampling_params import SamplingParams

Run = Callable[[int], None]  # called with the number of repetitions


class StepTimer:
    """Measures steps on an idle engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._on_gpu = engine.runner.device.type == "cuda"

    def step_of(self, case: StepCase) -> StepInput:
        """Build the step of a case. Raises InputError if the engine cannot hold it."""
        engine = self._engine
        limits = (
            ("--max-num-seqs", case.num_requests, "requests", engine.config.max_num_seqs),
            (
                *("--max-num-batched-tokens", case.num_tokens, "tokens in a step"),
                engine.config.max_num_batched_tokens,
            ),
            ("--max-model-len", case.longest, "tokens of context", engine.max_model_len),
        )
        for flag, needed, noun, limit in limits:
            if needed > limit:
                raise InputError(
                    f"case {case.name}",
                    f"needs {needed} {noun}, but {flag} is {limit}",
                    "raise this limit",
                )
        pool, page_size = engine.scheduler.pool, engine.config.block_size
        if case.num_pages(page_size) > pool.num_free:
            raise InputError(
                f"case {case.name}",
                f"needs {case.num_pages(page_size)} KV pages, but only {pool.num_free} are free",
                f"raise {'--gpu-memory-utilization' if self._on_gpu else '--cpu-kv-cache-memory'}",
            )
        chunks, tables = [], []
        for kind in case.requests:
            for _ in range(kind.count):
                table: list[int] = []
                pool.grow_(table, kind.kv_len + kind.query_len)
                tables.append(table)
                request = _request(len(chunks), kind.kv_len + kind.query_len, table)
                chunks.append(Chunk(request, kind.kv_len, kind.query_len, kind.num_sampled))
        step = StepInput.build(
            StepPlan(chunks=tuple(chunks)), page_size=page_size, rows=RequestRows(len(chunks))
        )
        for table in tables:
            pool.release_(table)  # the pages keep their contents, because nothing else runs
        return replace(step, page_moves=pool.take_moves())

    def replayed(self, step: StepInput) -> tuple[Run, str]:
        """Prepare a step. Return a function that runs it, and the kind of CUDA graph that it uses.

        The kind is "engine", "captured" or "none".
        """
        graph = self._engine.workers.prepare_replay(step)
        return self._engine.workers.run_replay, graph

    def sample_us(self, run: Run, iters: int) -> float:
        """Run a step `iters` times without a pause. Return the microseconds of one run."""
        if not self._on_gpu:
            started = time.perf_counter()
            run(iters)
            return 1e6 * (time.perf_counter() - started) / iters
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run(iters)
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end) / iters

    def launch_us(self, step: StepInput, iters: int) -> float:
        """Return the microseconds of a whole step: transfer of inputs, model, sampling."""

        def run(count: int) -> None:
            for _ in range(count):
                self._engine.workers.launch(step)

        return self.sample_us(run, iters)


def _request(index: int, length: int, table: list[int]) -> Request:
    return Request(
        request_id=f"case-{index}",
        token_ids=[7 + index % 1000] * length,
        num_prompt_tokens=length,
        max_tokens=8,
        params=SamplingParams(temperature=0),
        seed=0,
        stop_token_ids=frozenset(),
        eos_token_ids=frozenset(),
        block_table=table,
    )
