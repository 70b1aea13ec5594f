"""Latent attention on a CUDA GPU: kernels, CUDA graphs and chunks in a whole engine.

In float32, where a reading that is a little wrong shows; in it no kernel takes experts, so that
no layer has any.
"""

import random

import pytest

from qserve.llm import LLM
from qserve.params.sampling_params import SamplingParams
from tests.conftest import make_tiny
from tests.qserve.model.test_family_tokens import check_greedy
from tests.qserve.model.variants import TOKENS, relative
from tests.tiny_families import TINY_FAMILIES

pytestmark = pytest.mark.gpu

SMALL = {"max_model_len": 128, "num_gpu_blocks_override": 128}
MODES = {
    "graphs": {},
    "chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 8},
    "eager": {"enforce_eager": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config_class, extra = TINY_FAMILIES["deepseek_v3"]
    extra = {**extra, "first_k_dense_replace": 3}
    return make_tiny(tmp_path_factory.mktemp("latent") / "model", config_class, extra)


def test_logits_equal_cpu(folder):
    want = LLM(folder, device="cpu", max_model_len=64).logits(TOKENS)
    on_gpu = LLM(folder, device="cuda", dtype="float32", **SMALL)
    assert relative(on_gpu.logits(TOKENS).cpu(), want) < 1e-4


@pytest.mark.parametrize("mode", MODES)
def test_greedy_tokens_equal_transformers(folder, transformers_model, mode):
    rng = random.Random(2)
    start = [rng.randrange(3, 512) for _ in range(33)]
    prompts = [[rng.randrange(3, 512) for _ in range(n)] for n in (9, 40, 70, 1)]
    prompts += [start + prompt[:9] for prompt in prompts]  # beginnings that are there
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    llm = LLM(folder, device="cuda", dtype="float32", **SMALL, **MODES[mode])
    outputs = llm.generate(prompts, params, use_tqdm=False)
    check_greedy(transformers_model(folder), prompts, outputs)
