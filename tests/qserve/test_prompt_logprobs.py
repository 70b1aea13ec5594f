"""Log probabilities of prompts: transformers' own, however the prompt is cut into steps."""

import numpy as np
import pytest
import torch

import qserve.engine.runner.prompt_logprobs as module
from qkernels import ops
from qserve.engine.request import Request
from qserve.engine.scheduling.plan import Chunk, StepPlan
from qserve.engine.step.step_input import PromptRows
from qserve.llm import LLM
from qserve.params.sampling_params import ParameterError, SamplingParams

PROMPTS = [[(7 * i + 3 * j) % 500 + 3 for j in range(n)] for i, n in enumerate((1, 2, 33, 57, 9))]
SCORE = SamplingParams(max_tokens=0, prompt_logprobs=3, temperature=0, detokenize=False)
# the engine's settings, steps in flight
MODES = {
    "whole": ({}, 0),
    "chunks of 11": ({"max_num_batched_tokens": 11, "max_num_seqs": 4}, 0),
    "a token a step, one in flight": ({"max_num_batched_tokens": 1, "max_num_seqs": 1}, 1),
    "preempted": (
        {
            "num_gpu_blocks_override": 12,
            "admission": "fits",
            "block_size": 8,
            "max_num_batched_tokens": 16,
            "max_num_seqs": 4,
        },
        1,
    ),
}


@pytest.fixture(scope="module")
def references(docs_5m, transformers_model):
    """log-softmax [S, V] of transformers' logits after each token of each prompt."""
    model = transformers_model(docs_5m)
    with torch.no_grad():
        return [model(torch.tensor([ids])).logits[0].log_softmax(-1) for ids in PROMPTS]


def check(found, ids, reference_SV):
    assert found[0] is None and len(found) == len(ids)
    for position, entry in enumerate(found[1:], start=1):
        values = reference_SV[position - 1]
        token = ids[position]
        rank = int((values > values[token]).sum()) + 1
        assert next(iter(entry)) == token and entry[token].rank == rank
        want = {each: place for place, each in enumerate(values.topk(3).indices.tolist(), start=1)}
        assert {each: logprob.rank for each, logprob in entry.items()} == {token: rank} | want
        for each, logprob in entry.items():
            assert logprob.logprob == pytest.approx(values[each].item(), abs=2e-4)
            assert logprob.decoded_token is None  # detokenize=False


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", MODES)
def test_prompt_logprobs_equal_transformers(docs_5m, references, mode, monkeypatch):
    """Slices of two rows: a vocabulary that is larger than the memory for logits."""
    monkeypatch.setattr(module, "SLICE_LOGITS", 2 * 8192)
    settings, in_flight = MODES[mode]
    llm = LLM(docs_5m, device="cpu", **settings)
    llm.engine._max_in_flight = in_flight
    params = [SCORE] * len(PROMPTS)
    if mode == "preempted":
        params = [
            SamplingParams(
                max_tokens=24, prompt_logprobs=3, temperature=0, ignore_eos=True, detokenize=False
            )
        ] * len(PROMPTS)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for output, reference_SV in zip(outputs, references, strict=True):
        check(output.prompt_logprobs, output.prompt_token_ids, reference_SV)
        (completion,) = output.outputs
        assert len(completion.token_ids) == (24 if mode == "preempted" else 0)
        assert completion.finish_reason == "length"
    llm.engine.scheduler.check_integrity()
    assert llm.engine.scheduler.pool.num_free == llm.engine.scheduler.pool.num_pages


@pytest.mark.parametrize("quantization", [None, "w4a16", "w8a8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prompt_logprobs_equal_generated_logprobs_bitwise(docs_5m, quantization, dtype):
    """Tokens drawn in a batch, and the same tokens as prompts, as a trainer compares them."""
    llm = LLM(
        docs_5m,
        device="cpu",
        batch_invariant=True,
        quantization=quantization,
        dtype=dtype,
        max_num_batched_tokens=19,
        max_num_seqs=3,
    )
    drawn = SamplingParams(
        max_tokens=20, temperature=1.0, seed=3, logprobs=2, ignore_eos=True, detokenize=False
    )
    outputs = [each.outputs[0] for each in llm.generate(PROMPTS, drawn, use_tqdm=False)]
    whole = [ids + each.token_ids for ids, each in zip(PROMPTS, outputs, strict=True)]
    read = SamplingParams(max_tokens=0, prompt_logprobs=2, temperature=0, detokenize=False)
    for ids, output, again in zip(
        PROMPTS, outputs, llm.generate(whole, read, use_tqdm=False), strict=True
    ):
        found = again.prompt_logprobs[len(ids) :]
        assert [{t: one.logprob for t, one in each.items()} for each in output.logprobs] == [
            {t: one.logprob for t, one in each.items()} for each in found
        ]


def test_forced_tokens_are_drawn_regardless_of_logits():
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(6, 300, generator=generator) * 9
    logits[2, 7] = logits[3] = logits[4, 0] = -torch.inf
    logits[3, 9] = 1.0
    tokens = np.array([0, 299, 7, 9, 5, 200])
    for count in (0, 4):
        found = ops.sample_(logits, module.drawing(tokens, count))
        given = found.tokens_S == torch.from_numpy(tokens)
        assert given.tolist() == [True, True, False, True, True, True]
        expected = logits.double().log_softmax(-1)
        got = expected.gather(1, found.tokens_S[:, None])[:, 0]
        torch.testing.assert_close(found.logprobs_S.double(), got, atol=1e-5, rtol=1e-5)
        assert found.top_tokens_SN.shape == (6, count)
    hidden, rows = torch.eye(6), PromptRows(rows=np.arange(6), targets=tokens, num_alternatives=1)
    handle = module.launch_prompt_logprobs(lambda x_SC: x_SC @ logits.nan_to_num(), hidden, rows)
    assert torch.isfinite(handle.logprobs.wait()).all()
    handle = module.launch_prompt_logprobs(lambda x_SC: logits[x_SC.argmax(1)], hidden, rows)
    assert handle.logprobs.wait().isinf().tolist() == [False, False, True, False, False, False]


def test_preempted_mode_causes_preemptions(docs_5m):
    settings, _ = MODES["preempted"]
    llm = LLM(docs_5m, device="cpu", **settings)
    params = SamplingParams(
        max_tokens=24, prompt_logprobs=0, temperature=0, ignore_eos=True, detokenize=False
    )
    for i, prompt in enumerate(PROMPTS):
        llm.engine.add_request(str(i), prompt, params)
    num_preempted = 0
    while llm.engine.has_work():
        llm.engine.step()
        num_preempted += llm.engine.report().num_preempted
    assert num_preempted


def test_prompt_logprobs_only_on_request(docs_5m, references):
    llm = LLM(docs_5m, device="cpu")
    plain = SamplingParams(max_tokens=3, temperature=0, logprobs=2, detokenize=False)
    asking = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=3, n=2, detokenize=False)
    first, second = llm.generate([PROMPTS[2], PROMPTS[3]], [plain, asking], use_tqdm=False)
    assert first.prompt_logprobs is None and len(first.outputs[0].logprobs) == 3
    check(second.prompt_logprobs, PROMPTS[3], references[3])
    assert second.outputs[0].token_ids == second.outputs[1].token_ids


def test_zero_max_tokens_requires_prompt_logprobs():
    with pytest.raises(ParameterError, match="max_tokens.*1 or more, found 0"):
        SamplingParams(max_tokens=0, detokenize=False)
    with pytest.raises(ParameterError, match="prompt_logprobs.*0 to 20, found 21"):
        SamplingParams(prompt_logprobs=21, detokenize=False)


def request(length, prompt_logprobs=0):
    return Request(
        request_id="r",
        token_ids=list(range(100, 100 + length)),
        num_prompt_tokens=length,
        max_tokens=4,
        params=SamplingParams(prompt_logprobs=prompt_logprobs, detokenize=False),
        seed=0,
        stop_token_ids=frozenset(),
        eos_token_ids=frozenset(),
        prompt_logprobs=None if prompt_logprobs is None else [],
    )


def test_recomputed_prompt_reports_logprobs_once():
    """It was preempted in the middle of its prompt; another such request is next in the queue."""
    again, silent, short = request(10, 2), request(3, None), request(3)
    plan = module.plan_prompt_rows(StepPlan(chunks=(Chunk(again, 0, 6),)))
    assert plan.rows.rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert plan.rows.targets.tolist() == [101, 102, 103, 104, 105, 106]
    assert module.plan_prompt_rows(StepPlan(chunks=(Chunk(again, 0, 5),))) is None
    chunks = (Chunk(silent, 0, 3, 1), Chunk(again, 5, 5, 1), Chunk(short, 0, 3, 1))
    plan = module.plan_prompt_rows(StepPlan(chunks=chunks))
    # 3 rows of the silent one; the sixth of the other is known; its last predicts no prompt token
    assert plan.rows.rows.tolist() == [4, 5, 6, 8, 9]
    assert plan.rows.targets.tolist() == [107, 108, 109, 101, 102]
    assert plan.rows.num_alternatives == 2
    assert [count for _, count in plan.counts] == [3, 2]
    assert module.plan_prompt_rows(StepPlan(chunks=(Chunk(silent, 0, 3),))) is None


def test_prompt_logprobs_add_no_step_cost_if_unused(tiny_model, monkeypatch):
    from qserve.engine import in_flight

    searched = []
    plan = in_flight.plan_prompt_rows
    monkeypatch.setattr(
        in_flight, "plan_prompt_rows", lambda step: (searched.append(step), plan(step))[1]
    )
    llm = LLM(str(tiny_model("llama")), device="cpu", max_model_len=64)
    quiet = SamplingParams(max_tokens=4, temperature=0, detokenize=False)
    llm.generate([[5, 6, 7]], quiet, use_tqdm=False)
    assert not searched
    asking = SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=0, detokenize=False)
    llm.generate([[5, 6, 7]], asking, use_tqdm=False)
    count = len(searched)
    assert count > 0
    llm.generate([[5, 6, 7]], quiet, use_tqdm=False)
    assert len(searched) == count
