"""A plan as arrays: sampling words of its rows, and the request of each row."""

import math
from dataclasses import fields, is_dataclass

import msgspec
import numpy as np
import pytest

from qkernels.sampling.settings import SampleSettings
from qkernels.sampling.words import BIAS_END, BIAS_START, SampleRow
from qserve.engine.kv_cache.block_pool import BlockPool
from qserve.engine.request import Request, Status
from qserve.engine.scheduling.scheduler import Chunk, Scheduler, StepPlan
from qserve.engine.step import step_input
from qserve.engine.step.request_rows import RequestRows
from qserve.engine.step.step_input import StepInput
from qserve.params.sampling_params import ParameterError, SamplingParams


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
        block_table=[3, 1, 2],
    )


def build(*requests, rows=None, num_sampled=1):
    """All of each request as one chunk."""
    chunks = [
        Chunk(request=each, start=0, count=each.num_tokens, num_sampled=num_sampled)
        for each in requests
    ]
    plan = StepPlan(chunks=tuple(chunks))
    return StepInput.build(plan, page_size=4, rows=rows or RequestRows(2))


def sample_rows(step):
    """The sampling words of each sampled row, as far as these tests need them."""
    settings = SampleSettings.of_words(step.sample_words_SP, step.sample_bias_E)
    ends = settings.words_SP[:, [BIAS_START, BIAS_END]].tolist()
    entries = settings.bias_E.numpy()
    values = (entries & 0xFFFFFFFF).astype(np.uint32).view(np.float32).tolist()
    biases = list(zip((entries >> 32).tolist(), values, strict=True))
    names = ("seed", "position", "history_row", "num_logprobs")
    columns = [settings.column(name).tolist() for name in names]
    return [
        SampleRow(**dict(zip(names, row, strict=True)), bias=tuple(biases[start:end]))
        for row, (start, end) in zip(zip(*columns, strict=True), ends, strict=True)
    ]


def sample_row(asking):
    (row,) = sample_rows(build(asking))
    return row


def test_end_tokens_are_forbidden_until_min_tokens():
    params = {"min_tokens": 2, "stop_token_ids": [3], "logit_bias": {4: 1.5}}
    forbidden = ((4, 1.5), (1, -math.inf), (3, -math.inf))
    assert sample_row(request([7, 7], [5], **params)).bias == forbidden
    assert sample_row(request([7, 7], [5, 5], **params)).bias == ((4, 1.5),)


def test_draw_depends_only_on_seed_and_position():
    row = sample_row(request([7, 7], [5]))
    assert (row.seed, row.position) == (5, 3)


def test_chunk_may_sample_several_of_its_rows():
    """Each is drawn at its own position, and min_tokens counts up to there."""
    asking, rows = request([7, 7], [5, 5, 6], min_tokens=2), RequestRows(2)
    step = build(request([7]), asking, rows=rows, num_sampled=1)
    assert step.logits_rows_S.tolist() == [0, 5]
    step = build(asking, rows=rows, num_sampled=3)
    assert step.logits_rows_S.tolist() == [2, 3, 4]
    assert [row.position for row in sample_rows(step)] == [3, 4, 5]
    assert [bool(row.bias) for row in sample_rows(step)] == [True, False, False]


def test_in_flight_token_is_read_from_its_sampling_row():
    rows = RequestRows(4)
    first, second, third = (request([n]) for n in (7, 8, 9))
    build(first, second, third, rows=rows)
    for each in (first, third):
        each.num_pending = 1
    step = build(third, first, rows=rows)
    assert step.token_ids_T.tolist() == [9, 0, 7, 0]
    assert (step.pending_index.tolist(), step.pending_row.tolist()) == ([1, 3], [2, 0])
    # of a request that samples several rows, the last
    build(request([1]), third, rows=rows, num_sampled=2)
    assert build(third, rows=rows).pending_row.tolist() == [3]


def test_slots_follow_block_table():
    step = build(request([7] * 6), request([7]))
    assert step.slots_T.tolist() == [12, 13, 14, 15, 4, 5, 12]
    assert step.block_tables_RX[:, :3].tolist() == [[3, 1, 2]] * 2
    assert step.block_tables_RX.shape[1] == 16, "widths that Triton compiles alike"
    assert step.query_starts_R1.tolist() == [0, 6, 7] and step.context_lengths_R.tolist() == [6, 1]


def test_request_without_penalties_has_no_history():
    step = build(request([7]))
    assert sample_rows(step)[0].history_row == -1 and step.history_fills == ()


def test_history_row_is_filled_once_and_kept():
    """Between steps the sampler counts on the device; the host must not count again."""
    rows, asking = RequestRows(2), request([7, 8], [6], frequency_penalty=1.0)
    first, second = (build(asking, rows=rows) for _ in range(2))
    (fill,) = first.history_fills
    assert fill.prompt_token_ids.tolist() == [7, 8] and fill.output_token_ids.tolist() == [6]
    assert second.history_fills == ()
    assert fill.row == sample_rows(first)[0].history_row == sample_rows(second)[0].history_row == 0


def test_rows_of_ended_and_preempted_requests_are_reused():
    rows = RequestRows(2)
    first, second, third = (request([n], [4], repetition_penalty=1.1) for n in (1, 2, 3))
    fills = build(first, second, rows=rows).history_fills
    assert [fill.row for fill in fills] == [first.row, second.row] == [0, 1]
    first.status, first.row = Status.WAITING, -1  # as the scheduler preempts it
    (fill,) = build(third, rows=rows).history_fills
    assert fill.row == third.row == 0 and fill.prompt_token_ids.tolist() == [3]
    second.status, first.status = Status.FINISHED, Status.RUNNING
    first.block_table = [9, 8]
    step = build(first, rows=rows)
    (fill,) = step.history_fills
    assert fill.row == first.row == 1 and fill.prompt_token_ids.tolist() == [1]
    assert step.block_tables_RX[0, :2].tolist() == [9, 8], "not of its row's last owner"


LEAVES = (bool, int, float, str, bytes, np.ndarray, type(None))


def leaves(value):
    if isinstance(value, tuple):
        return [leaf for each in value for leaf in leaves(each)]
    if is_dataclass(value):
        return [leaf for field in fields(value) for leaf in leaves(getattr(value, field.name))]
    return [value]


def encode_array(array):
    assert type(array) is np.ndarray and not array.dtype.hasobject, array
    return {"dtype": array.dtype.str, "shape": array.shape, "data": array.tobytes()}


def decode_array(kind, made):
    assert kind is np.ndarray
    return np.frombuffer(made["data"], made["dtype"]).reshape(made["shape"])


@pytest.mark.parametrize("num_steps", [1, 2])
def test_step_is_unchanged_after_a_codec_round_trip(num_steps):
    """Round trip of a full schedule through a codec that knows its types and arrays."""
    scheduler = Scheduler(
        BlockPool(64, 4), max_num_seqs=8, max_num_batched_tokens=32, prefix_caching=False
    )
    for params in (
        {"seed": 3, "min_tokens": 4, "logit_bias": {3: 1.5}},
        {"presence_penalty": 0.5, "top_k": 7, "logprobs": 2},
        {"temperature": 0.0},
    ):
        asking = request([4, 5, 6] * 5, **params)
        asking.status, asking.block_table = Status.WAITING, []
        scheduler.add(asking)
    rows = RequestRows(8)
    for _ in range(num_steps):
        step = StepInput.build(scheduler.schedule(), page_size=4, rows=rows)
    assert len(step.history_fills) == (num_steps == 1)
    assert len(step.pending_index) == (0, 2)[num_steps - 1]
    assert all(type(leaf) in LEAVES for leaf in leaves(step))
    payload = msgspec.msgpack.Encoder(enc_hook=encode_array).encode(step)
    got = msgspec.msgpack.Decoder(StepInput, dec_hook=decode_array).decode(payload)
    for ours, theirs in zip(leaves(step), leaves(got), strict=True):
        assert type(ours) is type(theirs)
        if type(ours) is np.ndarray:
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert np.array_equal(ours, theirs)


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


@pytest.mark.parametrize("seed", range(6))
def test_few_decodes_build_the_same_arrays(seed, monkeypatch):
    """Steps of a few requests take a separate code path, with the same result."""
    kinds = ({}, {"temperature": 0.8, "top_p": 0.9, "top_k": 3}, {"logprobs": 2}, {"min_tokens": 1})

    def steps(most_few):
        draw = np.random.default_rng(seed + 100)
        monkeypatch.setattr(step_input, "FEW_DECODES", most_few)
        rows = RequestRows(4)
        requests = [request(range(2, 4 + i), **kinds[i * (seed > 3)]) for i in range(4)]
        for each in requests:
            each.block_table = draw.permutation(40)[:3].tolist()
        for number in range(14):
            chosen = [each for each in requests if draw.random() < 0.7] or requests[:1]
            if number == 9:
                requests[1].status = Status.FINISHED
                requests[1] = request([5, 6, 7])
                chosen = requests
            chunks = []
            for each in chosen:
                start = len(each.token_ids) - 1
                if draw.random() < 0.5:  # its token is in flight
                    start += 1
                each.block_table += [int(draw.integers(40))] * (start // 4 >= len(each.block_table))
                chunks.append(Chunk(request=each, start=start, count=1, num_sampled=1))
            yield StepInput.build(StepPlan(chunks=tuple(chunks)), page_size=4, rows=rows)
            for each in chosen:
                each.token_ids.append(int(draw.integers(2, 99)))

    built = []
    of_few = StepInput._of_few_decodes
    monkeypatch.setattr(
        StepInput, "_of_few_decodes", lambda *a, **k: built.append(1) or of_few(*a, **k)
    )
    few, many = list(steps(8)), list(steps(0))
    assert len(built) == 14 if seed <= 3 else 0 < len(built) < 14
    for one, other in zip(few, many, strict=True):
        for field in fields(StepInput):
            got, want = getattr(one, field.name), getattr(other, field.name)
            if isinstance(want, np.ndarray):
                assert got.dtype == want.dtype and np.array_equal(got, want), field.name
            else:
                assert got == want and type(got) is type(want), field.name


def test_keys_of_an_output_with_a_window_replace_each_other():
    """Prompt of 3 tokens, window of 2: the output's tokens use the slots 3 and 4 in turn."""
    windowed = request([7, 8, 9], [1] * 6)
    windowed.output_window = 2
    rows, slots, lengths, positions = RequestRows(2), [], [], []
    for start in range(2, 9):
        chunk = Chunk(request=windowed, start=start, count=1, num_sampled=1)
        step = StepInput.build(StepPlan(chunks=(chunk,)), page_size=4, rows=rows)
        slots += step.slots_T.tolist()
        lengths += step.context_lengths_R.tolist()
        positions += step.positions_T.tolist()
        assert step.max_context_len == lengths[-1]
    # pages 3 and 1 of the table: slot 3 of the request is 15, slot 4 is 4
    assert slots == [14, 15, 4, 15, 4, 15, 4]
    assert lengths == [3, 4, 5, 5, 5, 5, 5]
    assert positions == list(range(2, 9))


def test_media_rows_are_only_prompt_tokens():
    """Two requests in chunks; the rows of the output are text, whatever their tokens."""
    plain, pictured = request([7, 8], [5]), request([4, 5, 5, 6], [5, 5])
    pictured.is_media_N = np.array([False, True, True, False])
    chunks = (
        Chunk(request=plain, start=1, count=2, num_sampled=1),
        Chunk(request=pictured, start=2, count=4, num_sampled=1),
    )
    step = StepInput.build(StepPlan(chunks=chunks), page_size=4, rows=RequestRows(2))
    assert step.is_media_T.tolist() == [False, False, True, False, False, False]
    assert step.has_media
    alone = StepInput.build(StepPlan(chunks=chunks[:1]), page_size=4, rows=RequestRows(2))
    assert alone.is_media_T is None and not alone.has_media
