"""Steps with decodes and prompt chunks: attention computes both parts separately."""

import random

import numpy as np
import pytest
import torch

from qkernels.attention import ops
from qserve import LLM, SamplingParams
from qserve.engine.step.decode_rows import decode_rows
from qserve.engine.step.device_step import Batch, BatchForm
from tests.qserve.engine.make_step import make_step
from tests.qserve.ties import assert_same_up_to_ties

CPU = torch.device("cpu")


def test_first_requests_of_few_rows_are_decodes():
    counts = [1, 1, 1, 3, 1, 1, 4, 4] + [5, 1, 70]
    contexts = np.array([*range(20, 31)], np.int32)
    step = make_step(counts, context_lengths_R=contexts)
    batch = Batch.of(step, CPU, BatchForm(page_size=16, decode_query_len=4))
    found = batch.decodes
    assert (found.num_requests, found.num_rows) == (8, 16)
    assert (found.max_query_len, found.max_context_len) == (4, 27)
    decodes, chunks = batch.divided(found)
    assert decodes.query_starts_R1.tolist() == [0, 1, 2, 3, 6, 7, 8, 12, 16]
    assert chunks.query_starts_R1.tolist() == [0, 5, 6, 76]
    assert decodes.context_lengths_R.tolist() == contexts[:8].tolist()
    assert chunks.context_lengths_R.tolist() == contexts[8:].tolist()
    assert (chunks.max_query_len, chunks.max_context_len) == (70, 99)
    tables = torch.cat([decodes.block_tables_RX, chunks.block_tables_RX])
    assert torch.equal(tables, batch.block_tables_RX)


@pytest.mark.parametrize("num_decodes", [1, 2, 3, 5])
def test_addresses_of_both_parts_are_aligned(num_decodes):
    """Otherwise kernels would be compiled while requests wait, and launched more slowly."""
    step = make_step([1] * num_decodes + [9, 20])
    batch = Batch.of(step, CPU, BatchForm(page_size=16, decode_query_len=1))
    for part in batch.divided(batch.decodes):
        for array in (part.block_tables_RX, part.query_starts_R1, part.context_lengths_R):
            assert array.data_ptr() % 16 == 0


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param([1] * 20, id="no chunk"),
        pytest.param([4] * 20, id="drafts alone"),
        pytest.param([40, *[1] * 20], id="a chunk first"),
        pytest.param([40], id="one chunk"),
    ],
)
def test_other_steps_are_not_divided(counts):
    assert decode_rows(make_step(counts), CPU, 4) is None


def test_steps_are_not_divided_if_no_layer_divides_them():
    step = make_step([1] * 8 + [9])
    assert Batch.of(step, CPU, BatchForm(page_size=16)).decodes is None
    assert Batch.of(step, CPU, BatchForm(page_size=16, decode_query_len=1)).decodes is not None


@pytest.mark.parametrize("kv_cache", ["auto", "int8"])
def test_prompts_beside_decodes_do_not_change_tokens(docs_5m, monkeypatch, kv_cache):
    """Seven requests decode while others start: their tokens are those of each request alone."""
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 2000) for _ in range(n)] for n in [*range(5, 12), 40, 61]]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    rows = []

    def counted(q_THD, cache, step, *others):
        rows.append((step.decodes.num_requests, len(q_THD) - step.decodes.num_rows))
        return attend_divided(q_THD, cache, step, *others)

    attend_divided = ops._attend_divided
    monkeypatch.setattr(ops, "_attend_divided", counted)
    settings = {"device": "cpu", "dtype": "float32", "kv_cache_dtype": kv_cache}
    llm = LLM(docs_5m, max_model_len=256, max_num_seqs=16, max_num_batched_tokens=48, **settings)
    together = [each.outputs[0].token_ids for each in llm.generate(prompts, params, use_tqdm=False)]
    assert max(count for count, _ in rows) >= 5 and max(chunk for _, chunk in rows) > 30
    rows.clear()
    alone = [llm.generate([each], params, use_tqdm=False)[0] for each in prompts]
    assert not rows
    assert together == [each.outputs[0].token_ids for each in alone]


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("kv_cache", ["auto", "fp8"])
def test_gpu_computes_decodes_beside_prompts(quantized_5m, monkeypatch, kv_cache, graphs):
    """60 requests decode while others start: each token is one of the best of the request alone.

    With float8 pages the two kernels round differently: of 64 requests computed together and alone
    as undivided steps, one differed by 0.31 in log probability (one H200).
    """
    settings = {"device": "cuda", "dtype": "bfloat16", "kv_cache_dtype": kv_cache}
    settings |= {"max_model_len": 256, "max_num_seqs": 64, "num_gpu_blocks_override": 1024}
    llm = LLM(
        quantized_5m,
        **settings,
        max_num_batched_tokens=96,
        enable_prefix_caching=False,
        enforce_eager=not graphs,
    )
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 2000) for _ in range(n)] for n in [9, 30] * 30 + [90, 140, 33, 50]]
    keys, rows = [], []
    if graphs:
        replay = llm.engine.runner.graphs.replay
        monkeypatch.setattr(
            llm.engine.runner.graphs, "replay", lambda key: keys.append(key) or replay(key)
        )
    else:
        attend = ops._attend_divided
        monkeypatch.setattr(ops, "_attend_divided", lambda *a: rows.append(a) or attend(*a))
    params = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, logprobs=2, detokenize=False
    )
    together = [each.outputs[0] for each in llm.generate(prompts, params, use_tqdm=False)]
    assert rows or sum(bool(key.decode_query_len) for key in keys) >= 5
    count = len(rows), sum(bool(key.decode_query_len) for key in keys)
    alone = [llm.generate([each], params, use_tqdm=False)[0].outputs[0] for each in prompts]
    assert_same_up_to_ties(alone, together, tie=0.1 if kv_cache == "auto" else 0.4)
    assert count == (len(rows), sum(bool(key.decode_query_len) for key in keys)), "alone"
