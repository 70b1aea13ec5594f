"""Linears that leave split-K partials to their consumer; the logits are those without that."""

from dataclasses import replace

import pytest
import torch

from qkernels import ops
from qkernels.gpu.device import lacks_arch
from qkernels.operands.split_k import SplitKPartials
from qserve.llm import LLM

TOKENS = [3, 17, 200, 5, 9, 77, 41, 300, 8, 1, 2, 500]


def test_linears_of_a_layer_name_the_operation_after_them(quantized_5m, monkeypatch):
    """No CPU kernel returns partial sums, so a fake one returns the result and zeros."""
    llm = LLM(quantized_5m, device="cpu", max_model_len=64)
    want = llm.logits(TOKENS)
    asked = []
    plan_linear, linear = ops.plan_linear, ops.linear

    def plan(weight, rows, consumer=None, **options):
        if consumer is not None:
            asked.append((consumer, weight.out_features))
        made = plan_linear(weight, rows, consumer, **options)
        return made if consumer is None else replace(made, output="split_k")

    def leave_partials(x, weight, bias=None, plan=None):
        y = linear(x, weight, bias, plan)
        if plan is None or plan.output == "sum":
            return y
        parts = torch.stack([y.float(), torch.zeros_like(y, dtype=torch.float32)])
        return SplitKPartials(parts=parts, dtype=weight.dtype)

    monkeypatch.setattr(ops, "plan_linear", plan)
    monkeypatch.setattr(ops, "linear", leave_partials)
    assert torch.equal(llm.logits(TOKENS), want)
    config = llm.engine.runner.decoder.config
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    of_layer = [("rope", qkv), ("norm", config.hidden_size), ("norm", config.hidden_size)]
    assert asked == of_layer * config.num_layers


@pytest.mark.gpu
def test_gpu_partial_sums_change_logits_only_by_rounding(quantized_5m, monkeypatch):
    lacks = lacks_arch(torch.device("cuda"), "sm_90")
    if lacks is not None:
        pytest.skip(lacks)
    llm = LLM(quantized_5m, device="cuda", dtype="float16", max_model_len=128, enforce_eager=True)
    made = []
    linear = ops.linear

    def counted(*args):
        y = linear(*args)
        made.append(isinstance(y, SplitKPartials))
        return y

    monkeypatch.setattr(ops, "linear", counted)
    steps = [(TOKENS * 6)[:rows] for rows in (5, 17, 33, 64)]
    got = [llm.logits(tokens) for tokens in steps]
    assert len(made) == 4 * 16 and sum(made) == 4 * 12, "three of four in each layer"
    plan_linear = ops.plan_linear
    monkeypatch.setattr(
        ops, "plan_linear", lambda weight, rows, consumer=None: plan_linear(weight, rows)
    )
    made.clear()
    for tokens, each in zip(steps, got, strict=True):
        want = llm.logits(tokens)
        assert (each - want).abs().max() < 0.01 * want.abs().max()
    assert not any(made)
