"""Layers that take codes get them from the operation before; the logits are those without that."""

import json
from dataclasses import replace

import pytest
import torch

from calibrate.layer_map import find_layer_map
from calibrate.pipeline import quantize_checkpoint
from formats.scheme import Scheme
from qkernels import ops
from qkernels.linear.prepared import PreparedWeight
from qkernels.operands.codes import Codes, InputRounding
from qserve.llm import LLM
from qserve.model.blocks.linear import FloatLinear, SplitLinear
from qserve.params.sampling_params import SamplingParams

TOKENS = [3, 17, 200, 5, 9, 77, 41, 300, 8, 1, 2, 500]
LAYERS = 3


@pytest.fixture(scope="module")
def quantized(tiny_model, tmp_path_factory):
    """Scheme -> folder of the tiny Llama-like model in it."""
    made = {}

    def make(name):
        if name not in made:
            source = tiny_model("llama")
            config = json.loads((source / "config.json").read_text())
            layer_map = find_layer_map(config)
            names = [n for i in range(LAYERS) for n in layer_map.linear_names(i, config)]
            made[name] = tmp_path_factory.mktemp("fused") / "model"
            quantize_checkpoint(
                source,
                made[name],
                scheme=Scheme.parse(name),
                output_format="compressed-tensors",
                progress=False,
                input_scales=dict.fromkeys(names, 0.05) if "static" in name else None,
            )
        return made[name]

    return make


def run(folder):
    llm = LLM(folder, device="cpu", max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    prompts = [TOKENS[start:] for start in range(4)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    tokens = [output.outputs[0].token_ids for output in outputs]
    return llm.logits(TOKENS), tokens


def made_codes(counts):
    """How often each operation made codes, by its name."""
    return {op: count for (op, form), count in counts.items() if form is InputRounding}


def without_fusion(monkeypatch):
    """Plans name the form that kernels take, but ask no operation before to make it."""
    plan_linear = ops.plan_linear
    monkeypatch.setattr(
        ops, "plan_linear", lambda *args: replace(plan_linear(*args, fused=False), input=None)
    )


@pytest.mark.parametrize("name", ["w8a8", "w8a8-static", "w8a8-fp8", "w8a8-fp8-static"])
def test_fusion_changes_no_logits_or_tokens(quantized, monkeypatch, count_forms, name):
    taken = []
    linear = ops.linear
    monkeypatch.setattr(ops, "linear", lambda x, *args: taken.append(type(x)) or linear(x, *args))
    fused_logits, fused_tokens = run(quantized(name))
    before = made_codes(count_forms)
    # of each layer one linear after each norm, and one after the activation
    assert before["activate"] * 3 == taken.count(Codes) > 0
    assert before["norm"] + before["norm of a sum"] == 2 * before["activate"]
    without_fusion(monkeypatch)
    logits, tokens = run(quantized(name))
    assert made_codes(count_forms) == before, "without fusion none of them makes codes"
    assert torch.equal(logits, fused_logits)
    assert tokens == fused_tokens


@pytest.mark.parametrize("family", ["gemma2", "granite", "olmo2"])
def test_fusion_after_norms_and_factors_changes_no_logits(written, monkeypatch, family):
    """Rounding is fused with sums and with GELU; OLMo's linears read the sum itself."""
    folder = written("w8a8", "compressed-tensors", family)
    taken = []
    linear = ops.linear
    monkeypatch.setattr(ops, "linear", lambda x, *args: taken.append(type(x)) or linear(x, *args))
    fused_logits, fused_tokens = run(folder)
    assert taken.count(Codes) > taken.count(torch.Tensor) / 2
    without_fusion(monkeypatch)
    logits, tokens = run(folder)
    assert torch.equal(logits, fused_logits)
    assert tokens == fused_tokens


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["w8a8", "w8a8-fp8"])
def test_gpu_fusion_changes_values_by_at_most_one_rounding(quantized, monkeypatch, name):
    def gpu_logits():
        return LLM(quantized(name), device="cuda", max_model_len=64).logits(TOKENS).float()

    fused = gpu_logits()
    without_fusion(monkeypatch)
    apart = gpu_logits()
    assert (fused - apart).norm() < 0.02 * apart.norm()


@pytest.mark.parametrize("name", ["w8a8-fp8-block", "w8a16-sym-g32"])
def test_layers_without_code_inputs_get_tensors(quantized, count_forms, name):
    assert run(quantized(name))[0].isfinite().all()
    assert not made_codes(count_forms)


def test_split_layers_take_codes_only_with_equal_rounding():
    def member(name, scale=None):
        linear = FloatLinear(torch.zeros(8, 16))
        spec, activation = Scheme.parse(name).weight, Scheme.parse(name).activation
        tensors = {"codes": torch.zeros(8, 16)}
        weight = PreparedWeight(
            kernel="reference",
            tensors=tensors | ({} if scale is None else {"input_scale": torch.tensor(scale)}),
            spec=spec,
            out_features=8,
            in_features=16,
            dtype=torch.float32,
            activation=activation,
        )
        linear.plan = lambda rows, consumer=None: ops.plan_linear(weight, rows, consumer)
        return linear

    same = SplitLinear([member("w8a8"), member("w8a8")])
    assert same.plan(1).input == member("w8a8").plan(1).input is not None
    for members in (
        [member("w8a8"), member("w8a8-fp8")],
        [member("w8a8"), FloatLinear(torch.zeros(8, 16))],
        [FloatLinear(torch.zeros(8, 16)), member("w8a8")],
        [member("w8a8-static", 0.1), member("w8a8-static", 0.2)],
        # equal, but to see it the host would wait for the GPU in every step
        [member("w8a8-static", 0.1), member("w8a8-static", 0.1)],
        [member("w8a8-fp8-block"), member("w8a8-fp8-block")],
    ):
        assert SplitLinear(members).plan(1).input is None
