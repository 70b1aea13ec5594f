"""Kolibri 1: quantized tokens, published names, and experts that are chosen by logits."""

import pytest
import torch
from safetensors.torch import load_file

from calibrate.pipeline import quantize_checkpoint
from calibrate.texts.data import CalibrationData
from formats.scheme import Scheme
from qserve.llm import LLM
from tests.qserve.model.test_family_tokens import check_greedy
from tests.qserve.model.test_hybrid_tokens import MODES, greedy, in_transformers, prompts
from tests.qserve.model.test_transformers import dense
from tests.qserve.model.variants import TOKENS, edited, logits, relative


@pytest.fixture(scope="module")
def source(tiny_model):
    return tiny_model("kolibri")


@pytest.mark.parametrize(
    ("scheme", "recipe"),
    [
        ("w4a16-sym-g32", "gptq"),
        pytest.param("w4a16-asym-g32", "awq", marks=pytest.mark.exhaustive),
    ],
)
def test_quantized_tokens_equal_dequantized(source, tmp_path, scheme, recipe):
    ids_WS = torch.randint(3, 500, (4, 24), generator=torch.Generator().manual_seed(0))
    folder = tmp_path / "model"
    quantize_checkpoint(
        source,
        folder,
        scheme=Scheme.parse(scheme),
        output_format="compressed-tensors" if "sym" in scheme.split("-") else "awq",
        recipe=recipe,
        calibration=CalibrationData(ids_WS=ids_WS, source="test", seed=0),
        progress=False,
    )
    model = in_transformers(dense(folder, tmp_path / "dense", torch.float32))
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(folder), want) < 1e-5
    llm = LLM(folder, device="cpu", max_model_len=64, **MODES["chunked and preempted"])
    check_greedy(model, prompts(), greedy(llm, prompts()))


def test_names_of_published_files_and_of_transformers(source, tmp_path):
    """transformers writes the published names."""
    names = {
        "post_attn_norm": "post_self_attn_layernorm",
        "post_ffn_norm": "post_mlp_layernorm",
        "moe.router.expert_bias": "mlp.gate.e_score_correction_bias",
    }

    def rename(state):
        for stored in list(state):
            name = stored
            for published, own in names.items():
                name = name.replace(published, own)
            state[name] = state.pop(stored)

    for published in names:
        assert any(published in name for name in load_file(source / "model.safetensors"))
    folder = edited(source, tmp_path / "model", rename)
    assert torch.equal(logits(folder), logits(source))


@pytest.mark.parametrize("change", [{"scores": "sigmoid"}, {"normalized": False}])
def test_a_wrong_reading_is_seen(source, change):
    from dataclasses import replace

    llm = LLM(source, device="cpu", max_model_len=64)
    right = llm.logits(TOKENS)
    for layer in llm.engine.runner.decoder.layers:
        layer.mlp.router.routing = replace(layer.mlp.router.routing, **change)
    assert relative(llm.logits(TOKENS), right) > 1e-3
