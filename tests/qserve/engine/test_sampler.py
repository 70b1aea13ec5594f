"""What rows ask of the sampler, and the token counts of requests with penalties."""

import math
from types import SimpleNamespace

import pytest
import torch

from qserve.engine.model_runner import ModelRunner, num_pages_on_gpu
from qserve.engine.request import Request, Status
from qserve.engine.sampler import TokenHistory, sample_row
from qserve.engine.scheduler import Chunk
from qserve.sampling_params import ParameterError, SamplingParams

CPU = torch.device("cpu")


def request(prompt, output=(), **params):
    return Request(
        request_id="r",
        token_ids=[*prompt, *output],
        num_prompt_tokens=len(prompt),
        max_tokens=9,
        params=SamplingParams(max_tokens=9, **params),
        seed=5,
        stop_token_ids=frozenset(params.get("stop_token_ids", ())),
        eos_token_ids=frozenset({1}),
        status=Status.RUNNING,
    )


def row_after(asking, history=None):
    chunk = Chunk(request=asking, start=0, count=asking.num_tokens, samples=True)
    return sample_row(chunk, history or TokenHistory(2, 8, CPU))


def test_end_tokens_are_forbidden_until_min_tokens():
    params = {"min_tokens": 2, "stop_token_ids": [3], "logit_bias": {4: 1.5}}
    forbidden = ((4, 1.5), (1, -math.inf), (3, -math.inf))
    assert row_after(request([7, 7], [5], **params)).bias == forbidden
    assert row_after(request([7, 7], [5, 5], **params)).bias == ((4, 1.5),)


def test_the_draw_depends_on_seed_and_position():
    row = row_after(request([7, 7], [5]))
    assert (row.seed, row.position) == (5, 3)


def test_history_counts_prompt_and_output():
    history = TokenHistory(2, 8, CPU)
    row = row_after(request([7, 7, 2], [5, 2, 5], presence_penalty=1.0), history)
    assert row.history_row == 0
    assert history.table.tolist() == [[0, 0, 3, 0, 0, 4, 0, 1], [0] * 8]


def test_a_request_without_penalties_has_no_history():
    history = TokenHistory(2, 8, CPU)
    assert row_after(request([7]), history).history_row == -1
    assert history.table is None


def test_a_row_is_filled_once_and_kept():
    """Between steps the sampler counts on the device; the host must not count again."""
    history = TokenHistory(2, 8, CPU)
    asking = request([7], frequency_penalty=1.0)
    row_after(asking, history)
    history.table[0, 6] += 2
    asking.token_ids.append(6)
    assert row_after(asking, history).history_row == 0
    assert history.table[0].tolist() == [0, 0, 0, 0, 0, 0, 2, 1]


def test_rows_of_ended_and_preempted_requests_are_reused():
    history = TokenHistory(2, 8, CPU)
    first, second, third = (request([n], [4], repetition_penalty=1.1) for n in (1, 2, 3))
    assert [history.row_of(r) for r in (first, second)] == [0, 1]
    first.status = Status.WAITING
    assert history.row_of(third) == 0
    assert history.table[0].tolist() == [0, 0, 0, 1, 2, 0, 0, 0]
    second.status, first.status = Status.FINISHED, Status.RUNNING
    first.token_ids.append(4)
    assert history.row_of(first) == 1
    assert history.table[1].tolist() == [0, 1, 0, 0, 4, 0, 0, 0]


@pytest.mark.parametrize(
    "field, value",
    [
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        ("logprobs", 21),
        ("logprobs", -1),
    ],
)
def test_out_of_range_parameters_are_refused(field, value):
    with pytest.raises(ParameterError, match=field):
        SamplingParams(**{field: value})


def test_the_pages_leave_room_for_the_table(monkeypatch):
    """It is made by the first request with a penalty, long after memory was shared out."""
    history = TokenHistory(3, 8, CPU)
    GIB = 2**30
    runner = SimpleNamespace(
        device=CPU,
        allocate_pages=lambda num_pages: None,
        launch=lambda plan: SimpleNamespace(result=lambda: None),
        config=SimpleNamespace(gpu_memory_utilization=0.5),
        bytes_per_page=1,
        _history=history,
    )
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    stats = {"reserved_bytes.all.current": GIB, "allocated_bytes.all.peak": GIB}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (7 * GIB, 8 * GIB))
    chunk = SimpleNamespace(request=SimpleNamespace(block_table=[0]))
    plan = SimpleNamespace(chunks=[chunk])
    for table in (3 * 8 * 4, 0):
        runner.bytes_to_come = ModelRunner.bytes_to_come.fget(runner)
        assert num_pages_on_gpu(runner, plan) == 3 * GIB - table
        history.table = torch.zeros(3, 8, dtype=torch.int32)
