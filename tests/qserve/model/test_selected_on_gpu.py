"""Compressed and selected keys, blocks, Kimi delta and lightning attention on a CUDA GPU.

In float32, where a reading that is a little wrong shows. In it no kernel takes experts: layers have
none, or plain torch computes them. The judge is the engine on a CPU, which other tests compare with
transformers.
"""

import random

import pytest
import transformers

from qserve.llm import LLM
from qserve.params.sampling_params import SamplingParams
from tests.conftest import make_tiny
from tests.qserve.model.variants import relative
from tests.tiny_families import TINY_FAMILIES

pytestmark = pytest.mark.gpu

DENSE = {"mlp_layer_types": ["dense"] * 3}
FEW_KEYS = {"index_topk": 20, "index_n_heads": 16}
PLAIN_EXPERTS = {"kernel": ["experts=reference"], "enforce_eager": True}
FAMILIES = {
    "deepseek_v32": ({**DENSE, **FEW_KEYS}, {}),
    "glm_moe_dsa": (
        {**DENSE, **FEW_KEYS, "indexer_types": ["full", "shared", "full"]},
        {},
    ),
    "dots3": ({**DENSE, "index_topk": 20}, {}),
    "kimi_linear": (DENSE, {}),
    "minimax_m3": (DENSE, {}),
    "deepseek_v4": ({}, PLAIN_EXPERTS),
    "minimax": ({}, PLAIN_EXPERTS),
}
SMALL = {"max_model_len": 128, "num_gpu_blocks_override": 128}
MODES = {
    "graphs": {},
    "chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 8},
    "eager": {"enforce_eager": True},
}
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    """A folder, the settings of its engine, its logits and its tokens on a CPU."""
    (config_class, extra), (changed, settings) = (
        TINY_FAMILIES[request.param],
        FAMILIES[request.param],
    )
    if not hasattr(transformers, config_class):
        pytest.skip(f"transformers {transformers.__version__} has no {config_class}")
    folder = make_tiny(
        tmp_path_factory.mktemp("model") / "model", config_class, {**extra, **changed}
    )
    llm = LLM(folder, device="cpu", max_model_len=128)
    tokens = [out.outputs[0].token_ids for out in llm.generate(prompts(), PARAMS, use_tqdm=False)]
    return folder, settings, llm.logits(prompts()[2]), tokens


def prompts():
    rng = random.Random(2)
    start = [rng.randrange(3, 512) for _ in range(33)]
    found = [[rng.randrange(3, 512) for _ in range(n)] for n in (9, 40, 70, 1)]
    return found + [start + prompt[:9] for prompt in found]  # beginnings that are there


def test_logits_equal_cpu(model):
    folder, settings, want, _ = model
    llm = LLM(folder, device="cuda", dtype="float32", **SMALL, **settings)
    assert relative(llm.logits(prompts()[2]).cpu(), want) < 1e-4


@pytest.mark.parametrize("mode", MODES)
def test_greedy_tokens_equal_cpu(model, mode):
    folder, settings, _, want = model
    settings = {**SMALL, **MODES[mode], **settings}
    llm = LLM(folder, device="cuda", dtype="float32", **settings)
    outputs = llm.generate(prompts(), PARAMS, use_tqdm=False)
    found = [output.outputs[0].token_ids for output in outputs]
    assert [list(tokens) for tokens in found] == [list(tokens) for tokens in want]
