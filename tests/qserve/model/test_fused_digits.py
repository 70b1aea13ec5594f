"""Layers that take limbs get them from the operation before; the logits are those without that."""

import pytest
import torch

from qkernels import ops
from qkernels.gpu.device import lacks_gluon
from qkernels.operands.limbs import LimbForm
from qkernels.operands.limbs_reference import from_limbs
from qserve.llm import LLM
from qserve.sampling_params import SamplingParams

TOKENS = [3, 17, 200, 5, 9, 77, 41, 300, 8, 1, 2, 500]
MAKERS = ("to_limbs", "rms_norm_limbs", "add_rms_norm_limbs", "silu_and_mul_limbs")


@pytest.fixture
def counts(count_calls):
    """How often each operation of limbs was called."""
    return count_calls(ops, (*MAKERS, "linear_limbs"))


def decoded(folder, prompts, **options):
    llm = LLM(folder, max_model_len=64, max_num_seqs=4, **options)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    outputs = llm.generate(prompts, params, use_tqdm=False, detokenize=False)
    drawn = [output.outputs[0] for output in outputs]
    logprobs = torch.tensor([[each.logprob for each in one.logprobs] for one in drawn])
    return [one.token_ids for one in drawn], logprobs


def test_a_decode_step_hands_digits_on(quantized_5m, monkeypatch, counts):
    """On a CPU no kernel is faster for them, so a stand-in takes them: their own inputs."""
    want_tokens, want = decoded(quantized_5m, [TOKENS], device="cpu", dtype="bfloat16")
    assert not any(counts.values())
    form = LimbForm(bits=4)
    monkeypatch.setattr(ops, "limb_form", lambda weight, M: form if M <= 2 else None)
    monkeypatch.setattr(
        ops,
        "linear_limbs",
        lambda x, weight, bias: ops.linear(from_limbs(x).to(weight.dtype), weight, bias),
    )
    tokens, got = decoded(quantized_5m, [TOKENS], device="cpu", dtype="bfloat16")
    assert tokens == want_tokens
    assert torch.equal(got, want), "bfloat16 has no bit that limbs lose here"
    layers, steps = 4, 7
    assert counts["rms_norm_limbs"] == steps
    assert counts["add_rms_norm_limbs"] == steps * (2 * layers - 1)
    assert counts["silu_and_mul_limbs"] == steps * layers


def test_a_prompt_of_more_rows_takes_them_as_they_are(quantized_5m, monkeypatch, counts):
    asked = []
    monkeypatch.setattr(ops, "limb_form", lambda weight, M: asked.append(M))
    LLM(quantized_5m, device="cpu", max_model_len=64).logits(TOKENS)
    assert set(asked) == {len(TOKENS)} and not any(counts.values())


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3, 4])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_fusion_on_a_gpu_moves_a_value_by_a_rounding_at_most(
    quantized_5m, monkeypatch, counts, batch, enforce_eager
):
    lacks = lacks_gluon(torch.device("cuda"))
    if lacks is not None:
        pytest.skip(lacks)
    prompts = [TOKENS[i:] for i in range(batch)]
    options = {"device": "cuda", "enforce_eager": enforce_eager}
    fused_tokens, fused = decoded(quantized_5m, prompts, **options)
    assert counts["silu_and_mul_limbs"] and counts["linear_limbs"]
    before = dict(counts)
    monkeypatch.setattr(ops, "limb_form", lambda weight, rows: None)
    tokens, apart = decoded(quantized_5m, prompts, **options)
    assert counts == before, "without fusion none of them runs"
    total = 0
    for i in range(batch):
        # greedy tokens may part where two are as likely; what follows is another text
        parted = [x != y for x, y in zip(tokens[i], fused_tokens[i], strict=True)]
        alike = parted.index(True) if any(parted) else len(parted)
        assert (fused[i, :alike] - apart[i, :alike]).abs().sum() < 0.1 * alike + 1e-6
        total += alike
    assert total >= 4 * batch
