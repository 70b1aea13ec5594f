"""A.X K1: norms after experts, and published files without corrections of routers."""

import json

import pytest
import torch

from calibrate.pipeline import quantize_checkpoint
from calibrate.texts.data import CalibrationData
from formats.checkpoint import CheckpointReader
from formats.inspection.inspect import inspect_checkpoint
from formats.scheme import Scheme
from qserve.llm import LLM
from tests.qserve.model.test_family_tokens import check_greedy
from tests.qserve.model.test_hybrid_tokens import MODES, greedy, in_transformers, prompts
from tests.qserve.model.test_transformers import dense
from tests.qserve.model.variants import TOKENS, edited, logits, relative

CORRECTION = "mlp.gate.e_score_correction_bias"
NORM = "post_mlp_layernorm.weight"


@pytest.fixture(scope="module")
def source(tiny_model):
    return tiny_model("axk1")


def test_published_files(source, tmp_path):
    """Without corrections, with a norm that the dense layer does not use, and older keys."""

    def publish(state):
        for name in [name for name in state if name.endswith(CORRECTION)]:
            del state[name]
        state[f"model.layers.0.{NORM}"] = torch.full((64,), 7.0)

    def change(config):
        del config["mlp_layer_types"]
        config.update(first_k_dense_replace=1, moe_layer_freq=1, model_type="AXK1")

    folder = edited(source, tmp_path / "model", publish, change)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "AXK1"
    zeros = edited(
        source,
        tmp_path / "zeros",
        lambda state: state.update(
            {name: torch.zeros_like(t) for name, t in state.items() if name.endswith(CORRECTION)}
        ),
    )
    assert torch.equal(logits(folder), logits(zeros))
    assert relative(logits(zeros), logits(source)) > 1e-3
    problems = inspect_checkpoint(folder).problems
    assert all("has no tokenizer" in problem.text for problem in problems), problems
    with torch.no_grad():
        want = in_transformers(zeros)(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(folder), want) < 1e-5


@pytest.mark.parametrize(
    ("scheme", "recipe", "output_format"),
    [
        ("w4a16-sym-g32", "gptq", "gptq"),
        pytest.param("w4a16-asym-g32", "awq", "awq", marks=pytest.mark.exhaustive),
    ],
)
def test_quantized_tokens_equal_dequantized(source, tmp_path, scheme, recipe, output_format):
    ids_WS = torch.randint(3, 500, (4, 24), generator=torch.Generator().manual_seed(0))
    folder = tmp_path / "model"
    quantize_checkpoint(
        source,
        folder,
        scheme=Scheme.parse(scheme),
        output_format=output_format,
        recipe=recipe,
        calibration=CalibrationData(ids_WS=ids_WS, source="test", seed=0),
        progress=False,
    )
    assert f"model.layers.1.{NORM}" in CheckpointReader(folder).entries
    assert f"model.layers.0.{NORM}" not in CheckpointReader(folder).entries
    model = in_transformers(dense(folder, tmp_path / "dense", torch.float32))
    llm = LLM(folder, device="cpu", max_model_len=64, **MODES["chunked and preempted"])
    check_greedy(model, prompts(), greedy(llm, prompts()))


def test_a_wrong_reading_is_seen(source):
    """The norm follows the sum of routed and shared experts."""
    llm = LLM(source, device="cpu", max_model_len=64)
    right = llm.logits(TOKENS)
    for layer in llm.engine.runner.decoder.layers[1:]:
        layer.mlp_end = layer.attention_end
    assert relative(llm.logits(TOKENS), right) > 1e-3
