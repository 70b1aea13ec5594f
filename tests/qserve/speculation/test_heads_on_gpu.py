"""Draft heads on a CUDA GPU: in bf16, in graphs, quantized, with a step in flight."""

import json

import pytest

from qserve.llm import LLM
from qserve.params.sampling_params import SamplingParams
from tests.qserve.speculation.docs_heads import CONFIGS, write_docs_head

pytestmark = pytest.mark.gpu

PROMPTS = [f"Section {n}: {'the compiler checks ' * n}" for n in range(1, 33)]


def greedy(folder, config=None):
    """(tokens of each prompt, counts of drafts)."""
    llm = LLM(
        folder,
        device="cuda",
        max_num_seqs=32,
        num_gpu_blocks_override=2048,
        speculative_config=None if config is None else json.dumps(config),
    )
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs], llm.engine.report().drafts


@pytest.mark.parametrize("count", [1, 3, 5])
def test_quantized_head_drafts_in_bf16(count, docs_5m):
    head = {"model": str(docs_5m.parent / "docs-5m-eagle3"), "num_speculative_tokens": count}
    want, _ = greedy(docs_5m)
    found, (verifies, drafts, *accepted) = greedy(docs_5m, {**head, "adaptive": False})
    # A verify's rows split the keys otherwise: where two tokens are near equal texts may part.
    same = sum(a == b for a, b in zip(want, found, strict=True))
    assert same >= 0.7 * len(want)
    assert all(a[0] == b[0] for a, b in zip(want, found, strict=True))
    assert drafts >= verifies > 0
    # on the CPU half of the first drafts are accepted
    assert accepted[0] > 0.3 * verifies


@pytest.mark.parametrize("kind", CONFIGS)
def test_single_pass_drafts_in_graphs(kind, docs_5m, tmp_path):
    """Random heads: none of their drafts is accepted but by chance, and texts stay the same."""
    head = {"model": str(write_docs_head(tmp_path, kind)), "num_speculative_tokens": 5}
    want, _ = greedy(docs_5m)
    found, (verifies, drafts, *_) = greedy(docs_5m, {**head, "adaptive": False})
    same = sum(a == b for a, b in zip(want, found, strict=True))
    assert same >= 0.7 * len(want)
    assert drafts > 4 * verifies > 0
