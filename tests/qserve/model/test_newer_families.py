"""CodeGen, GPT-Neo, BioGPT and LFM3: solved weights, conversion and inspection."""

import pytest
import torch

from calibrate.pipeline import quantize_checkpoint
from calibrate.texts.data import CalibrationData
from formats.checkpoint import CheckpointReader, read_json
from formats.convert import convert_checkpoint
from formats.errors import InputError
from formats.inspection.inspect import inspect_checkpoint
from formats.quant_config import BLOCK, QuantConfig
from formats.scheme import Scheme
from qserve.model.model_config import ModelConfig
from tests.qserve.model.test_hybrid_tokens import in_transformers
from tests.qserve.model.test_transformers import dense
from tests.qserve.model.variants import TOKENS, edited, logits, relative

exhaustive = pytest.mark.exhaustive
LATER = ("gpt_neo", "biogpt", "xglm", "lfm3")


@pytest.mark.parametrize(
    "family",
    [
        "codegen",
        *(pytest.param(name, marks=exhaustive) for name in ("gpt_neo", "biogpt", "xglm", "lfm3")),
    ],
)
def test_files_pass_inspection_and_convert(family, written, tmp_path):
    folder = written("w4a16-sym-g32", "gptq", family)
    convert_checkpoint(folder, tmp_path / "x", "compressed-tensors")
    for each in (folder, tmp_path / "x"):
        problems = inspect_checkpoint(each).problems
        assert all("has no tokenizer" in problem.text for problem in problems), problems
    assert torch.equal(logits(tmp_path / "x"), logits(folder))


def test_stored_table_of_sinusoids_is_not_read(tiny_model, tmp_path):
    """Older writers stored it."""
    source, name = tiny_model("xglm"), "model.embed_positions.weights"
    folder = edited(source, tmp_path / "x", lambda state: state.update({name: torch.ones(258, 64)}))
    assert torch.equal(logits(folder), logits(source))
    problems = inspect_checkpoint(folder).problems
    assert all("has no tokenizer" in problem.text for problem in problems), problems


@exhaustive
@pytest.mark.parametrize("recipe", ["gptq", "awq"])
def test_solved_weights_of_lfm3(recipe, tiny_model, tmp_path):
    """The layers of the calibrated run are transformers'; gates stay in float, and are named."""
    ids_WS = torch.randint(3, 500, (4, 24), generator=torch.Generator().manual_seed(0))
    folder = tmp_path / "model"
    quantize_checkpoint(
        tiny_model("lfm3"),
        folder,
        scheme=Scheme.parse("w4a16-asym-g32"),
        output_format="gptq",
        recipe=recipe,
        calibration=CalibrationData(ids_WS=ids_WS, source="test", seed=0),
        progress=False,
    )
    assert "model.layers.1.self_attn.gate_proj.weight" in CheckpointReader(folder).entries
    quant = QuantConfig.from_dict(read_json(folder / "config.json")[BLOCK])
    assert quant.scheme_for("model.layers.1.self_attn.gate_proj") is None
    assert quant.scheme_for("model.layers.0.conv.in_proj") is not None
    model = in_transformers(dense(folder, tmp_path / "dense", torch.float32))
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(folder), want) < 1e-5


@pytest.mark.parametrize(
    "pattern", [[[["global"], 2]], [[["global", "other"], 2]], [["global", 3]], "global", [[1]]]
)
def test_pattern_of_layers_that_does_not_fit_is_refused(pattern, tiny_model, tmp_path):
    changed = {"attention_types": pattern}
    folder = edited(tiny_model("gpt_neo"), tmp_path / "x", config=lambda c: c.update(changed))
    with pytest.raises(InputError, match="attention_types: expected global or local for each"):
        ModelConfig.from_folder(folder)
