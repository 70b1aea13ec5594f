"""Linears that leave parts of K to the operation after them; the logits are those without that."""

import pytest
import torch

from qkernels import ops
from qkernels.gpu.device import lacks_gluon
from qkernels.linear import input_forms
from qkernels.linear import ops as linear_ops
from qkernels.operands.split_k import SplitKPartials
from qserve.llm import LLM

TOKENS = [3, 17, 200, 5, 9, 77, 41, 300, 8, 1, 2, 500]


def test_linears_of_a_layer_name_the_operation_after_them(quantized_5m, monkeypatch):
    """On a CPU none leaves parts, so a stand-in does: the result, and a part of zeros."""
    llm = LLM(quantized_5m, device="cpu", max_model_len=64)
    want = llm.logits(TOKENS)
    asked = []

    def leave_parts(consumer, x, weight, bias=None):
        asked.append((consumer, weight.out_features))
        y = ops.linear(x, weight, bias).float()
        return SplitKPartials(parts=torch.stack([y, torch.zeros_like(y)]), dtype=weight.dtype)

    monkeypatch.setattr(ops, "linear_split_k", leave_parts)
    assert torch.equal(llm.logits(TOKENS), want)
    config = llm.engine.runner.decoder.config
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    of_layer = [("rope", qkv), ("norm", config.hidden_size), ("norm", config.hidden_size)]
    assert asked == of_layer * config.num_layers


@pytest.mark.gpu
def test_parts_on_a_gpu_move_a_logit_by_roundings(quantized_5m, monkeypatch):
    lacks = lacks_gluon(torch.device("cuda"))
    if lacks is not None:
        pytest.skip(lacks)
    llm = LLM(quantized_5m, device="cuda", dtype="float16", max_model_len=128, enforce_eager=True)
    made = []
    linear = input_forms.linear

    def counted(*args):
        y = linear(*args)
        made.append(isinstance(y, SplitKPartials))
        return y

    monkeypatch.setattr(input_forms, "linear", counted)
    steps = [(TOKENS * 6)[:rows] for rows in (5, 17, 33, 64)]
    got = [llm.logits(tokens) for tokens in steps]
    assert len(made) == 4 * 16 and sum(made) == 4 * 12, "three of four in each layer"
    monkeypatch.setattr(ops, "linear_split_k", lambda consumer, *args: linear_ops.linear(*args))
    for tokens, each in zip(steps, got, strict=True):
        want = llm.logits(tokens)
        assert (each - want).abs().max() < 0.01 * want.abs().max()
