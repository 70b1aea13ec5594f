"""Speculation on models with states on a CUDA GPU: graphs, kernels, a step in flight."""

import json

import pytest

from qserve.llm import LLM
from qserve.params.sampling_params import SamplingParams
from tests.qserve.speculation import table_drafter
from tests.qserve.speculation.hybrid_mtp_model import make_hybrid_mtp

pytestmark = pytest.mark.gpu
PROMPTS = [[(7 * n + 31 * j) % 500 + 3 for j in range(5 + 9 * n)] for n in range(12)]
FIELDS = {"greedy": {"temperature": 0}, "sampled": {"temperature": 0.8, "seed": 3}}
NUM_TOKENS = 40


def outputs(llm, fields):
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, **fields)
    found = llm.generate(PROMPTS, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in found]


def make(folder, **settings):
    settings = {"max_num_seqs": 8, "max_model_len": 256, "num_gpu_blocks_override": 256, **settings}
    return LLM(folder, device="cuda", **settings)


def check(folder, config, **settings):
    """Products of other row counts round otherwise: where two tokens are near, texts part.

    In bfloat16 that is soon.
    """
    first = 12 if settings["dtype"] == "float32" else 5
    plain = make(folder, **settings)
    want = {name: outputs(plain, fields) for name, fields in FIELDS.items()}
    del plain
    config = json.dumps({"num_speculative_tokens": 3, "adaptive": False, **config})
    llm = make(folder, speculative_config=config, **settings)
    for name, fields in FIELDS.items():
        found = outputs(llm, fields)
        same = sum(one == other for one, other in zip(found, want[name], strict=True))
        pairs = zip(found, want[name], strict=True)
        alike = sum(one[:first] == other[:first] for one, other in pairs)
        verifies, _, *accepted = llm.engine.scheduler.speculation.take_counts()
        print(
            f"{name}: {same} of {len(found)} texts, {alike} begin alike, {accepted} of {verifies}"
        )
        assert alike >= len(found) * 0.7
        assert 0 < accepted[0] <= verifies
    llm.engine.scheduler.check_integrity()
    return want


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_mtp_drafts_on_gpu(tmp_path, family, enforce_eager):
    dtype = "float32" if family == "qwen3_5" else "bfloat16"  # experts are not in float32
    folder = make_hybrid_mtp(tmp_path / family, family, 0.9)
    check(folder, {"method": "mtp"}, enforce_eager=enforce_eager, dtype=dtype)


@pytest.mark.parametrize("family", ["lfm2", "granite_hybrid", "falcon_h1", "nemotron_h"])
def test_frequently_accepted_drafts(tiny_model, monkeypatch, family):
    """Runs without graphs: the drafter reads tokens on the host."""
    folder, settings = tiny_model(family), {"dtype": "float32", "enforce_eager": True}
    plain = make(folder, **settings)
    texts = [a + list(b) for a, b in zip(PROMPTS, outputs(plain, FIELDS["greedy"]), strict=True)]
    texts += [a + list(b) for a, b in zip(PROMPTS, outputs(plain, FIELDS["sampled"]), strict=True)]
    del plain
    table_drafter.install(monkeypatch, texts)
    unused = str(tiny_model("llama"))  # the table_drafter takes its place
    check(folder, {"method": "draft_model", "model": unused}, **settings)
