"""Adapters of routed experts on a CUDA GPU: CUDA graphs, merged weights, quantized experts."""

import dataclasses

import pytest
import torch

from calibrate.pipeline import quantize_checkpoint
from formats.scheme import Scheme
from qserve.lora.merge import merge_adapter
from qserve.lora.request import LoRARequest
from tests.adapters import write_adapter
from tests.conftest import make_tiny
from tests.qserve.lora.test_lora_on_gpu import PARAMS, PROMPTS, make, tokens
from tests.tiny_families import TINY_FAMILIES

pytestmark = pytest.mark.gpu

SIZES = {"hidden_size": 128, "moe_intermediate_size": 128}
ENDS = ("o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Qwen3-MoE of sizes that the kernels take."""
    config_class, extra = TINY_FAMILIES["qwen3_moe"]
    return make_tiny(tmp_path_factory.mktemp("qwen3_moe") / "model", config_class, extra | SIZES)


@pytest.fixture(scope="module")
def loras(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return [
        LoRARequest(
            f"a{n}",
            n + 1,
            str(
                write_adapter(
                    model, folder / f"{n}", rank=3 + 9 * n, seed=n, size=0.6, experts=True
                )
            ),
        )
        for n in range(2)
    ]


def quantized(model, folder, scheme):
    quantize_checkpoint(model, folder, scheme=Scheme.parse(scheme), recipe="rtn", progress=False)
    return folder


def logprobs(llm, asked):
    """The log probability of each prompt token but the first."""
    params = dataclasses.replace(PARAMS, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate(PROMPTS, params, False, lora_request=asked)
    rows = (each for output in outputs for each in output.prompt_logprobs[1:])
    return torch.tensor([each.logprob for row in rows for each in row.values()])


@pytest.mark.parametrize("kind", ["float", "w4a16-sym", "w4a16-mxfp4", "w8a8"])
def test_graphs_and_eager_steps_agree(model, tmp_path, loras, kind):
    """Steps with and without adapters have graphs of their own; slots are filled anew."""
    folder = model if kind == "float" else quantized(model, tmp_path / "quantized", kind)
    # Prefix hits would change the shapes of steps, and with them last bits of a tiny random model.
    shared = {"dtype": "bfloat16", "enable_prefix_caching": False}
    settings = {"lora_experts": True, **shared}
    asked = [[*loras, None][n % 3] for n in range(len(PROMPTS))]
    eager, graphs = make(folder, enforce_eager=True, **settings), make(folder, **settings)
    assert any(key.has_adapters for key in graphs.engine.runner.graphs._keys)
    want, found = tokens(eager, asked), tokens(graphs, asked)
    same = [a[:8] == b[:8] for a, b in zip(want, found, strict=True)]
    assert sum(same) >= len(same) - 2
    plain = make(folder, enable_lora=False, **shared)
    assert tokens(graphs, None) == tokens(plain, None)
    few = make(folder, **{**settings, "max_loras": 1})
    for lora in loras:
        same = [
            a[:8] == b[:8] for a, b in zip(tokens(few, lora), tokens(graphs, lora), strict=True)
        ]
        assert sum(same) >= len(same) - 2


def test_logprobs_equal_merged_weights(model, tmp_path, loras):
    llm = make(model, lora_experts=True, dtype="bfloat16")
    without = logprobs(llm, None)
    for number, lora in enumerate(loras):
        merge_adapter(model, lora.lora_path, tmp_path / f"{number}")
        inside = logprobs(make(tmp_path / f"{number}", enable_lora=False, dtype="bfloat16"), None)
        beside = logprobs(llm, lora)
        assert (beside - inside).abs().mean() < 0.2 * (without - inside).abs().mean()


@pytest.mark.parametrize("kind", ["w4a16-sym", "w4a16-mxfp4"])
def test_logprobs_equal_those_of_a_cpu(model, tmp_path, loras, kind):
    """Quantized experts. Steps of more than 32 tokens sort their pairs."""
    folder = quantized(model, tmp_path / "quantized", kind)
    asked = [[*loras, None][n % 3] for n in range(len(PROMPTS))]
    found = [
        logprobs(make(folder, lora_experts=True, device=device, dtype=dtype), asked)
        for device, dtype in (("cpu", "float32"), ("cuda", "bfloat16"))
    ]
    assert (found[0] - found[1]).abs().mean() < 0.2 * found[0].std()


def test_tokens_do_not_depend_on_the_batch(model, loras):
    """With --batch-invariant, with and without adapters, alone and together."""
    llm = make(model, lora_experts=True, dtype="bfloat16", batch_invariant=True)
    asked = [[*loras, None][n % 3] for n in range(len(PROMPTS))]
    together = tokens(llm, asked)
    for n in (0, 1, 2, 11):
        output = llm.generate([PROMPTS[n]], PARAMS, False, lora_request=asked[n])
        assert output[0].outputs[0].token_ids == together[n]
