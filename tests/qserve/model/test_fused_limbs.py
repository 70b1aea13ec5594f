"""Layers that take limbs get them from the operation before; the logits are those without that."""

from dataclasses import replace

import pytest
import torch

from qkernels import ops
from qkernels.gpu.device import lacks_arch
from qkernels.operands.limbs import LimbForm, Limbs
from qkernels.operands.limbs_reference import from_limbs
from qserve.llm import LLM
from qserve.params.sampling_params import SamplingParams

TOKENS = [3, 17, 200, 5, 9, 77, 41, 300, 8, 1, 2, 500]


def made_limbs(counts):
    """How often each operation made limbs, by its name."""
    return {op: count for (op, form), count in counts.items() if form is LimbForm}


def decoded(folder, prompts, **options):
    llm = LLM(folder, max_model_len=64, max_num_seqs=4, **options)
    params = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, logprobs=1, detokenize=False
    )
    outputs = llm.generate(prompts, params, use_tqdm=False)
    drawn = [output.outputs[0] for output in outputs]
    pairs = [zip(one.token_ids, one.logprobs, strict=True) for one in drawn]
    logprobs = torch.tensor([[found[token].logprob for token, found in each] for each in pairs])
    return [one.token_ids for one in drawn], logprobs


def limbs_up_to(rows, monkeypatch):
    """Plan limbs on a CPU, where no kernel is faster with them; the reference kernel accepts them.

    Returns the forms of all inputs of linears, as they come.
    """
    form, plan_linear, linear = LimbForm(bits=4), ops.plan_linear, ops.linear
    taken = []

    def plan(weight, M, consumer=None, **options):
        made = plan_linear(weight, M, consumer, **options)
        return replace(made, input=form, operand=form) if rows >= M else made

    def from_inputs(x, weight, bias=None, plan=None):
        taken.append(type(x))
        if isinstance(x, Limbs):
            x = from_limbs(x).to(weight.dtype)
        return linear(x, weight, bias)

    monkeypatch.setattr(ops, "plan_linear", plan)
    monkeypatch.setattr(ops, "linear", from_inputs)
    return taken


def test_decode_step_passes_limbs(quantized_5m, monkeypatch, count_forms):
    want_tokens, want = decoded(quantized_5m, [TOKENS], device="cpu", dtype="bfloat16")
    assert not made_limbs(count_forms)
    taken = limbs_up_to(2, monkeypatch)
    tokens, got = decoded(quantized_5m, [TOKENS], device="cpu", dtype="bfloat16")
    assert tokens == want_tokens
    assert torch.equal(got, want), "bfloat16 has no bit that limbs lose here"
    layers, steps = 4, 7
    assert made_limbs(count_forms) == {
        "norm": steps,
        "norm of a sum": steps * (2 * layers - 1),
        "activate": steps * layers,
    }
    assert taken.count(Limbs) == steps * layers * 4, "attention's too"


def test_prompt_rows_use_unfused_inputs(quantized_5m, monkeypatch, count_forms):
    taken = limbs_up_to(len(TOKENS) - 1, monkeypatch)
    LLM(quantized_5m, device="cpu", max_model_len=64).logits(TOKENS)
    assert set(taken) == {torch.Tensor} and not made_limbs(count_forms)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3, 4])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_gpu_fusion_changes_values_by_at_most_one_rounding(
    quantized_5m, monkeypatch, count_forms, batch, enforce_eager
):
    lacks = lacks_arch(torch.device("cuda"), "sm_90")
    if lacks is not None:
        pytest.skip(lacks)
    prompts = [TOKENS[i:] for i in range(batch)]
    options = {"device": "cuda", "enforce_eager": enforce_eager}
    fused_tokens, fused = decoded(quantized_5m, prompts, **options)
    before = made_limbs(count_forms)
    assert before["activate"] and before["norm of a sum"]
    plan_linear = ops.plan_linear
    monkeypatch.setattr(
        ops, "plan_linear", lambda *args: replace(plan_linear(*args, fused=False), input=None)
    )
    tokens, apart = decoded(quantized_5m, prompts, **options)
    assert made_limbs(count_forms) == before, "without fusion none of them makes limbs"
    total = 0
    for i in range(batch):
        # greedy tokens may part where two are as likely; what follows is another text
        parted = [x != y for x, y in zip(tokens[i], fused_tokens[i], strict=True)]
        alike = parted.index(True) if any(parted) else len(parted)
        assert (fused[i, :alike] - apart[i, :alike]).abs().sum() < 0.1 * alike + 1e-6
        total += alike
    assert total >= 4 * batch
