"""The token counts that penalties need, and the memory they take."""

from types import SimpleNamespace

import numpy as np
import torch

from qserve.engine.runner.memory import num_pages_on_gpu
from qserve.engine.runner.model_runner import ModelRunner
from qserve.engine.runner.prompt_logprobs import SLICE_BYTES
from qserve.engine.runner.sampler import TokenHistory
from qserve.engine.step.step_input import HistoryFill
from tests.qserve.engine.make_step import make_step

CPU = torch.device("cpu")


def fill(row, prompt, output):
    return HistoryFill(
        row=row,
        prompt_token_ids=np.array(prompt, np.int64),
        output_token_ids=np.array(output, np.int64),
    )


def test_history_counts_prompt_and_output():
    history = TokenHistory(2, 8, CPU)
    history.fill_(fill(0, [7, 7, 2], [5, 2, 5]))
    assert history.table.tolist() == [[0, 0, 3, 0, 0, 4, 0, 1], [0] * 8]


def test_reused_row_has_no_old_history():
    history = TokenHistory(2, 8, CPU)
    history.fill_(fill(0, [1], [4, 4]))
    history.fill_(fill(1, [2], [4]))
    history.fill_(fill(0, [3], []))
    assert history.table.tolist() == [[0, 0, 0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 2, 0, 0, 0]]


def test_history_table_is_allocated_on_first_use():
    history = TokenHistory(2, 8, CPU)
    assert history.table is None and history.deferred_bytes == 2 * 8 * 4
    history.fill_(fill(1, [1], []))
    assert history.deferred_bytes == 0


def test_kv_pages_reserve_history_table_memory(monkeypatch):
    """The first request with a penalty allocates it, long after memory was divided up."""
    history = TokenHistory(3, 8, CPU)
    GIB = 2**30
    allocated = []
    runner = SimpleNamespace(
        device=CPU,
        allocate_pages=allocated.append,
        layer_caches=SimpleNamespace(free=lambda: None),
        launch=lambda step: SimpleNamespace(result=lambda: None),
        config=SimpleNamespace(gpu_memory_utilization=0.5),
        bytes_per_page=1,
        sampler=SimpleNamespace(history=history),
        encoder=None,
        cache_specs=[],
        media_buffers=lambda: SimpleNamespace(nbytes=5),
        chooses_snapshots=False,
        num_snapshots=0,
    )
    runner.sample = lambda: runner
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    stats = {
        "reserved_bytes.all.current": GIB,
        "allocated_bytes.all.peak": GIB,
        "allocated_bytes.all.current": GIB // 2,
    }
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (7 * GIB, 8 * GIB))
    step = make_step([4], width=5)
    for table in (3 * 8 * 4, 0):
        runner.deferred_bytes = ModelRunner.deferred_bytes.fget(runner)
        assert num_pages_on_gpu(runner, step).num_pages == 3 * GIB - table - SLICE_BYTES
        graphs = GIB // 2  # what the step of a graph takes beyond what was there
        with_graph = num_pages_on_gpu(runner, step, step)
        assert with_graph.num_pages == 3 * GIB - table - SLICE_BYTES - graphs - 5
        history.table = torch.zeros(3, 8, dtype=torch.int32)
    assert allocated == [5] * 4, "as many as the step writes to"
