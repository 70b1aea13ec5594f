"""Quantized heads and embeddings: transformers with the compressed-tensors library is the judge."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from calibrate.calibration.stream import Stream
from calibrate.gguf_file import quantize_to_gguf
from calibrate.pipeline import quantize_checkpoint
from calibrate.recipe import Recipe
from calibrate.solvers import gptq, rtn
from calibrate.texts.data import CalibrationData
from formats.checkpoint import CheckpointReader
from formats.convert import convert_checkpoint
from formats.errors import InputError
from formats.in_memory.weights import round_to_nearest
from formats.inspection.inspect import inspect_checkpoint
from formats.quant_config import BLOCK, EMBEDDING, HEAD
from formats.scheme import Scheme
from qserve.cli import main
from qserve.engine.start_check import check_start
from qserve.llm import LLM
from tests.qserve.model.variants import TOKENS, edited, logits, relative

W4, W8 = Scheme.parse("w4a16-sym-g64"), Scheme.parse("w8a16-sym-g64")
DATA = {"samples": 4, "sequence_length": 64, "progress": False}


def of_transformers(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", [W4, W8])
def test_quantized_head_loads_in_library_and_engine(small_5m, tmp_path, tied, head):
    pytest.importorskip("compressed_tensors")
    folder = tmp_path / "out"
    report = quantize_checkpoint(
        small_5m(tied),
        folder,
        scheme=W4,
        quantize_head=head,
        output_format="compressed-tensors",
        recipe="gptq",
        quality_windows=1,
        **DATA,
    )
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    targets = [name for g in config[BLOCK]["config_groups"].values() for name in g["targets"]]
    assert {"re:^lm_head$", "lm_head"}.intersection(targets)  # SGLang looks for its name
    assert report.linears[-1].name == HEAD and report.linears[-1].scheme == str(head)
    assert any("one matrix" in warning for warning in report.warnings) is tied
    assert relative(logits(folder), of_transformers(folder)) < 1e-4
    check_start(
        LLM(folder, device="cpu", max_model_len=64).engine, str(folder)
    )  # logits of the record
    source = load_file(small_5m(tied) / "model.safetensors")
    assert torch.equal(
        CheckpointReader(folder).get(f"{EMBEDDING}.weight"), source[f"{EMBEDDING}.weight"]
    )


def test_gptq_head_has_lm_head_key_for_vllm(small_5m, tmp_path):
    folder, other = tmp_path / "out", tmp_path / "other"
    quantize_checkpoint(small_5m(), folder, scheme=W4, quantize_head=W4, recipe="gptq", **DATA)
    block = json.loads((folder / "config.json").read_text())[BLOCK]
    assert (block["quant_method"], block["lm_head"]) == ("gptq", True)
    names = CheckpointReader(folder).children(HEAD)
    assert set(names) == {"qweight", "qzeros", "scales", "g_idx"}
    answers = {v.program: v.answer for v in inspect_checkpoint(folder).loads_in}
    assert answers == {"this project": "yes", "vLLM": "yes", "SGLang": "yes", "transformers": "no"}
    convert_checkpoint(folder, other, "compressed-tensors")
    assert relative(logits(folder), of_transformers(other)) < 1e-4


def recorded(found, corrects=False):
    """A recipe that rounds to nearest and keeps the statistics of each linear's input."""

    def solve(weight_NK, stats, spec, name):
        found[name] = stats
        return rtn.solve(weight_NK, stats, spec, name)

    return Recipe(name="recorded", solver=solve, corrects=corrects)


def test_head_hessian_equals_final_norm_outputs(small_5m, tmp_path):
    """Second moments of the inputs are those of transformers' hidden states."""
    pytest.importorskip("compressed_tensors")
    found, folder = {}, tmp_path / "out"
    ids = torch.arange(4 * 64).view(4, 64) * 31 % 8192
    report = quantize_checkpoint(
        small_5m(),
        folder,
        scheme=W4,
        quantize_head=W8,
        recipe=recorded(found, corrects=True),
        calibration=CalibrationData(ids_WS=ids, source="test", seed=0),
        progress=False,
    )
    states = []
    for each in (folder, small_5m()):
        model = transformers.AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32)
        with torch.no_grad():
            found_BSD = model(ids, output_hidden_states=True).hidden_states[-1]
        states.append(found_BSD.flatten(0, 1))
    x_TK, float_TK = states
    stats = found[HEAD]
    assert stats.num_tokens == report.linears[-1].tokens == ids.numel()
    assert relative(stats.moment_KK, x_TK.t() @ x_TK) < 1e-4
    assert relative(stats.drift_KK, (float_TK - x_TK).t() @ x_TK) < 1e-3


def test_gptq_head_beats_rounding(small_5m, tmp_path):
    errors = {}
    for name in ("rtn", "gptq"):
        report = quantize_checkpoint(
            small_5m(),
            tmp_path / name,
            scheme=W8,
            quantize_head=Scheme.parse("w3a16-sym-g64"),
            recipe=Recipe(name=name, solver={"rtn": rtn.solve, "gptq": gptq.solve}[name]),
            **DATA,
        )
        errors[name] = report.linears[-1].output_error
    assert errors["gptq"] < 0.8 * errors["rtn"], errors


@pytest.mark.parametrize("tied", [True, False])
def test_layers_are_calibrated_on_quantized_embedding(small_5m, tmp_path, tied):
    """Judged by transformers on a float folder with the table that the codes mean."""
    pytest.importorskip("compressed_tensors")
    found, folder = {}, tmp_path / "out"
    source = small_5m(tied)
    report = quantize_checkpoint(
        source,
        folder,
        scheme=W8,
        quantize_embedding=W4,
        recipe=recorded(found),
        quality_windows=1,
        **DATA,
    )
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is tied and config[BLOCK]["quant_method"] != "gptq"
    reader = CheckpointReader(folder)
    assert f"{EMBEDDING}.weight_packed" in reader and f"{EMBEDDING}.weight" not in reader
    table = load_file(source / "model.safetensors")[f"{EMBEDDING}.weight"]
    table = round_to_nearest(table, W4.weight).dequantize()

    def dense(tensors):
        for name in [n for n in tensors if n.startswith(f"{EMBEDDING}.")]:
            del tensors[name]
        tensors[f"{EMBEDDING}.weight"] = table

    def say(config):
        groups = config[BLOCK]["config_groups"]
        for key in [k for k, g in groups.items() if EMBEDDING in g["targets"]]:
            del groups[key]

    expected = of_transformers(edited(folder, tmp_path / "dense", dense, say))
    assert relative(logits(folder), expected) < 1e-4
    check_start(LLM(folder, device="cpu", max_model_len=64).engine, str(folder))
    sample_TK = found["model.layers.0.self_attn.q_proj"].sample()
    norm = load_file(source / "model.safetensors")["model.layers.0.input_layernorm.weight"]
    rows = table / table.square().mean(1, keepdim=True).add(1e-5).sqrt() * norm.float()
    nearest = torch.cdist(sample_TK, rows).min(1).values / sample_TK.norm(dim=1)
    assert float(nearest.max()) < 1e-3
    answers = {v.program: (v.answer, v.reason) for v in inspect_checkpoint(folder).loads_in}
    assert answers["vLLM"][0] == ("no" if tied else "yes")
    assert [each.name for each in report.linears][-1] == EMBEDDING


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize_head": Scheme.parse("w8a8")}, "`quantize_head` w8a8: expected integer codes"),
        ({"quantize_head": Scheme.parse("w8a16-sym-g96")}, "not divisible by the group size 96"),
        (
            {"quantize_embedding": W8, "output_format": "gptq"},
            "gptq cannot hold a quantized embedding",
        ),
        (
            {"quantize_head": W8, "ignore": ["lm_head"]},
            "ignored .remove one of the two flags",
        ),
    ],
)
def test_unwritable_head_settings_are_refused(small_5m, tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        quantize_checkpoint(small_5m(), tmp_path / "out", scheme=W4, **options, progress=False)
    assert not list(tmp_path.iterdir())


def test_gguf_head_and_embedding_types(small_5m, tmp_path):
    with pytest.raises(InputError, match="`quantize_head`: does not apply to GGUF files"):
        quantize_to_gguf(small_5m(), tmp_path / "a.gguf", scheme="q4_0", quantize_head=W8)


def test_head_group_size_defaults_to_linears(small_5m, tmp_path):
    words = ["quantize", str(small_5m()), "-o", str(tmp_path / "out"), "--scheme", "w4a16-sym"]
    words += ["--group-size", "64", "--recipe", "rtn", "--quality-windows", "0"]
    assert main([*words, "--quantize-head", "w8a16-sym", "--device", "cpu"]) == 0
    record = json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    assert record["linears"][-1]["scheme"] == "w8a16-sym-g64"
    assert "--quantize-head w8a16-sym" in (tmp_path / "out" / "quality.json").read_text()


def test_head_only_run_collects_no_layer_statistics(small_5m, tmp_path, monkeypatch):
    asked = []
    statistics = Stream.statistics
    monkeypatch.setattr(Stream, "statistics", lambda *args: asked.append(args) or statistics(*args))
    report = quantize_checkpoint(
        small_5m(),
        tmp_path / "out",
        scheme=W4,
        quantize_head=W4,
        ignore=["model.layers"],
        recipe="gptq",
        quality_windows=1,
        **DATA,
    )
    assert [linear.name for linear in report.linears] == [HEAD] and not asked
    assert 0 < report.quality["divergence"] < 1
