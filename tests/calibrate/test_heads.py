"""Training of draft heads, the target's own texts, and quantized heads."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate.heads.fit import FitSettings, fit
from calibrate.heads.quantize import quantize_head
from calibrate.heads.target import Target
from formats.errors import InputError
from formats.heads.folder import HeadFolder
from formats.heads.inspect import inspect_head
from formats.scheme import Scheme
from qserve import cli

ROOT = Path(__file__).resolve().parent.parent.parent
W4 = Scheme.parse("w4a16-sym", 32)


@pytest.fixture(scope="module")
def trained(docs_5m, tmp_path_factory):
    """The two trainings' folders, after a few batches: the scripts as users run them."""
    folder = tmp_path_factory.mktemp("trained")
    data = folder / "texts.jsonl"
    data.write_text(json.dumps({"text": (docs_5m / "README.md").read_text()}))
    common = [
        str(docs_5m),
        *("--data", str(data), "--device", "cpu", "--length", "32", "--batch", "4"),
        *("--continued", "8", "--sampling-batch", "8"),
    ]
    small = ["--draft-vocab", "256", "--steps", "2", "--intermediate-size", "64"]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        for script, more in (("train_eagle3", small), ("train_medusa", ["--heads", "2"])):
            patch.setattr(sys, "argv", [script, *common, *more, "--output", str(folder / script)])
            runpy.run_path(str(ROOT / "examples" / f"{script}.py"), run_name="__main__")
    return folder


def test_training_writes_servable_head(trained, docs_5m):
    report = json.loads((trained / "train_eagle3" / "training.json").read_text())
    assert report["batches"] >= 3 and len(report["accuracy_of_steps"]) == 5
    for layout in ("original", "speculators"):
        head = HeadFolder(trained / "train_eagle3" / layout)
        assert head.config.aux_layers(4) == (1, 2, 3)  # the usual ones of 4 layers are not three
        offsets, ids = head.get("d2t"), head.get("t2d").nonzero()[:, 0]
        assert torch.equal(offsets + torch.arange(256), ids)
    weights = HeadFolder(trained / "train_medusa" / "medusa")
    assert weights.config.num_heads == 2
    # each began as the model's output matrix, and learned
    embedding = load_file(docs_5m / "model.safetensors")["model.embed_tokens.weight"]
    learned = (weights.get("1.1.weight").float() - embedding.float()).abs().max()
    assert 0 < learned < 0.1


def test_learning_rate_decays_within_time_limit(monkeypatch):
    """Training ends when its time is over, even if batches are left."""
    module = torch.nn.Linear(4, 4)
    seen = []
    clock = iter(range(1000))
    monkeypatch.setattr("calibrate.heads.fit.time.monotonic", lambda: float(next(clock)))

    def losses(ids_BS):
        seen.append(ids_BS)
        loss = module(torch.ones(4)).square().sum()
        return [(loss, torch.tensor(0.5))]

    settings = FitSettings(epochs=50, batch=2, seconds=5)
    done = fit(module, torch.zeros(20, 3), losses, settings, progress=False)
    assert done == len(seen) == 4


def test_continuations_equal_transformers_greedy(docs_5m, monkeypatch):
    """The loop over fixed memory gives transformers' greedy tokens."""
    target = Target(docs_5m, device="cpu", aux_layers=(1,))
    prompts = torch.randint(3, 8000, (5, 11), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr("calibrate.heads.sampling.PREFILL_TOKENS", 22)
    found = target.continued(prompts, 24, temperature=0)
    monkeypatch.setattr("calibrate.heads.target.can_sample", lambda config: False)
    expected = target.continued(prompts, 24, temperature=0)
    assert torch.equal(found, expected)
    best = target.see(found).logits_BSV.argmax(-1)
    assert torch.equal(best[:, 10:-1], found[:, 11:])
    drawn = target.continued(prompts, 24, temperature=1.0)
    assert torch.equal(drawn[:, :11], prompts) and not torch.equal(drawn, found)


@pytest.mark.parametrize(
    "scheme",
    [W4, pytest.param(Scheme.parse("w8a8", None), marks=pytest.mark.exhaustive)],
    ids=str,
)
def test_eagle3_quantization_round_trips(scheme, trained, docs_5m, tmp_path):
    source = trained / "train_eagle3" / "original"
    report = quantize_head(
        source,
        tmp_path / "head",
        scheme=scheme,
        target=docs_5m,
        samples=9,
        sequence_length=48,
        progress=False,
    )
    assert len(report.linears) == 9 and report.left_in_float == {}
    assert all(linear.output_error < 0.2 for linear in report.linears)
    assert len(report.accuracy_before) == len(report.accuracy_after) == 3
    head = HeadFolder(tmp_path / "head")
    assert head.quant.scheme_for("lm_head") == scheme
    assert head.quant.scheme_for("midlayer.self_attn.q_proj") == scheme
    assert torch.equal(head.get("d2t"), HeadFolder(source).get("d2t"))
    inspection = inspect_head(tmp_path / "head")
    assert inspection.ok and {linear.scheme for linear in inspection.linears} == {str(scheme)}


@pytest.mark.exhaustive
def test_calibration_data_lowers_head_error(trained, docs_5m, tmp_path):
    errors = {}
    for recipe in ("rtn", "gptq"):
        report = quantize_head(
            trained / "train_eagle3" / "speculators",
            tmp_path / recipe,
            scheme=W4,
            recipe=recipe,
            target=docs_5m,
            samples=9,
            sequence_length=48,
            progress=False,
        )
        errors[recipe] = [linear.output_error for linear in report.linears]
    assert sum(errors["gptq"]) < 0.9 * sum(errors["rtn"])


def test_medusa_is_quantized_by_command(trained, docs_5m, tmp_path, capsys):
    source = str(trained / "train_medusa" / "medusa")
    arguments = ["--samples", "3", "--sequence-length", "48", "--target", str(docs_5m)]
    assert cli.main(["quantize", source, "-o", str(tmp_path / "head"), *arguments]) == 0
    assert "medusa head: 4 linears to w4a16-sym by gptq" in capsys.readouterr().out
    assert cli.main(["inspect", str(tmp_path / "head")]) == 0
    shown = capsys.readouterr().out
    assert "a draft head, medusa" in shown and "no problems found" in shown
    assert HeadFolder(tmp_path / "head").get("0.0.linear.bias").dtype == torch.bfloat16


@pytest.mark.parametrize(
    "more, problem",
    [
        (["--recipe", "gptq"], "add --target MODEL"),
        (["--recipe", "awq"], "use gptq or rtn"),
        (["--pad"], "--pad: .* is a draft head"),
    ],
)
def test_unsupported_head_settings_are_refused(more, problem, trained, tmp_path, capsys):
    source = str(trained / "train_medusa" / "medusa")
    assert cli.main(["quantize", source, "-o", str(tmp_path / "head"), *more]) == 1
    assert re.search(problem, capsys.readouterr().err)
    assert not (tmp_path / "head").exists()


def test_target_option_is_refused_for_models(docs_5m, tmp_path, capsys):
    arguments = ["quantize", str(docs_5m), "-o", str(tmp_path / "x"), "--target", str(docs_5m)]
    assert cli.main(arguments) == 1
    assert "is not a draft head" in capsys.readouterr().err


def test_head_of_other_model_is_refused(trained, tiny_model, tmp_path):
    with pytest.raises(InputError):
        quantize_head(
            trained / "train_eagle3" / "original",
            tmp_path / "head",
            scheme=W4,
            target=tiny_model("llama"),
            samples=2,
            sequence_length=16,
            progress=False,
        )
    assert not (tmp_path / "head").exists()


def test_damaged_head_is_reported_by_inspect(trained, tmp_path):
    source = trained / "train_eagle3" / "original"
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    tensors["norm.weight"][3] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    inspection = inspect_head(tmp_path)
    assert not inspection.ok
    assert inspection.problems == ("error: norm.weight: contains NaN or infinity",)
    del tensors["fc.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert "fc: is missing from the head" in inspect_head(tmp_path).problems[0]
