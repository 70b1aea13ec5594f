"""Speculation on a GPU: graphs, a step in flight, lengths that advance on the device."""

import pytest
import torch

from qserve import LLM, SamplingParams
from qserve.speculation import graphs

pytestmark = pytest.mark.gpu
PROMPTS = [list(range(20 + 5 * n, 60 + 9 * n)) for n in range(12)]
KINDS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "seed": 3, "top_p": 0.95},
    "penalties": {"temperature": 0, "frequency_penalty": 0.4},
    "logprobs": {"temperature": 0, "logprobs": 2},
}
METHODS = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 2},
    "itself": {"method": "draft_model"},
}


def outputs(llm, fields):
    params = SamplingParams(max_tokens=48, ignore_eos=True, **fields, detokenize=False)
    found = llm.generate(PROMPTS, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in found]


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_drafts_do_not_change_tokens_on_gpu(docs_5m, method, enforce_eager):
    """Products of other row counts round otherwise: where two tokens are near, texts part."""
    plain = LLM(docs_5m, max_num_seqs=16, max_model_len=512, num_gpu_blocks_override=1024)
    want = {name: outputs(plain, fields) for name, fields in KINDS.items()}
    del plain
    config = {"num_speculative_tokens": 3, "adaptive": False} | METHODS[method]
    config |= {"model": str(docs_5m)} if method == "itself" else {}
    llm = LLM(
        docs_5m,
        max_num_seqs=16,
        max_model_len=512,
        num_gpu_blocks_override=1024,
        enforce_eager=enforce_eager,
        speculative_config=config,
    )
    for name, fields in KINDS.items():
        found = outputs(llm, fields)
        same = sum(one == other for one, other in zip(found, want[name], strict=True))
        verifies, drafts, *accepted = llm.engine.scheduler.speculation.take_counts()
        print(f"{method} {name}: {same} of {len(found)} texts, {accepted} of {verifies}")
        assert same >= len(found) * 2 / 3
        if method == "itself":
            assert accepted[0] > 0.9 * verifies > 0
    if method == "itself" and not enforce_eager:
        assert llm.engine.runner.speculator.graphs._entries
    llm.engine.scheduler.check_integrity()


def test_graphs_are_captured_before_they_are_needed(docs_5m, monkeypatch):
    llm = LLM(
        docs_5m,
        max_num_seqs=16,
        max_model_len=512,
        num_gpu_blocks_override=1024,
        speculative_config={
            "method": "draft_model",
            "model": str(docs_5m),
            "num_speculative_tokens": 3,
            "adaptive": False,
        },
    )
    while llm.engine.use_idle_time():
        pass
    captured = []
    monkeypatch.setattr(graphs.Captured, "capture", lambda each: captured.append(each))
    for fields in (KINDS["greedy"], KINDS["sampled"]):
        outputs(llm, fields)
    assert not captured
    of_drafts = llm.engine.runner.speculator.graphs
    assert of_drafts._entries.keys() == set(llm.engine.runner.graphs.decode_keys)


def test_synthetic_acceptance_rate_is_as_requested(docs_5m):
    llm = LLM(
        docs_5m,
        max_num_seqs=8,
        max_model_len=512,
        num_gpu_blocks_override=1024,
        speculative_config={
            "method": "draft_model",
            "model": str(docs_5m),
            "num_speculative_tokens": 3,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": 2.5,
            "adaptive": False,
        },
    )
    params = SamplingParams(max_tokens=300, ignore_eos=True, temperature=0, detokenize=False)
    llm.generate(PROMPTS[:8], params, use_tqdm=False)
    verifies, _, *accepted = llm.engine.scheduler.speculation.take_counts()
    assert 1 + sum(accepted) / verifies == pytest.approx(2.5, abs=0.15)
    assert torch.cuda.is_available()
