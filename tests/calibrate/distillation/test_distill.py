"""`qserve distill`: less divergence from the float model; only scales and norms change."""

import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from calibrate.distillation.distill import distill_checkpoint
from calibrate.distillation.student import Student
from calibrate.distillation.training import Teacher, Training, TrainingSettings
from calibrate.float_model import FloatModel
from calibrate.pipeline import quantize_checkpoint
from calibrate.texts.data import CalibrationData
from formats.checkpoint import CheckpointReader
from formats.errors import DiskError, InputError
from formats.inspection.inspect import inspect_checkpoint
from formats.quality.checksums import damaged
from formats.quality.record import read_quality
from formats.scheme import Scheme
from qserve.cli import build_parser, main
from qserve.llm import LLM

IDS = torch.randint(3, 512, (96, 24), generator=torch.Generator().manual_seed(1))
DATA = CalibrationData(ids_WS=IDS, source="random", seed=0)
HELD_OUT = range(7, 96, 8)
QUICK = TrainingSettings(steps=24, tokens=96, rate=0.01, norm_rate=0.0005)
FAMILIES = ["qwen3", "gemma2", "deepseek_v2", "qwen3_moe", "granite_hybrid"]
FAMILIES.append("gemma4_shared")


@pytest.fixture(scope="module")
def quantized(tiny_model, tmp_path_factory):
    """quantized(family, scheme, format, ...) -> the folder, rounded to nearest."""
    made = {}

    def make(family, scheme, output_format, **settings):
        key = family, scheme, output_format, repr(settings)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("distill") / "model"
            quantize_checkpoint(
                tiny_model(family),
                made[key],
                scheme=Scheme.parse(scheme),
                output_format=output_format,
                progress=False,
                **settings,
            )
        return made[key]

    return make


def distilled(source, reference, target, settings=QUICK, **others):
    return distill_checkpoint(
        source,
        reference,
        target,
        calibration=DATA,
        settings=settings,
        quality_windows=0,
        progress=False,
        **others,
    )


def training_of(folder, reference):
    """A student with all windows and their teacher's states."""
    student = Student(CheckpointReader(folder, rounded=True), "cpu")
    teacher = Teacher(FloatModel(reference), "cpu")
    return student, Training(student, teacher, IDS, *teacher.last_states(IDS))


def engine_divergence(folder, reference):
    """Mean KL(float || quantized) of the held-out windows, by the engine's own logits."""
    sides = []
    for each in (reference, folder):
        llm = LLM(each, device="cpu", dtype="float32", max_model_len=64)
        rows = [llm.logits(IDS[window].tolist()).log_softmax(-1) for window in HELD_OUT]
        sides.append(torch.cat(rows))
    wanted, own = sides
    return float((wanted.exp() * (wanted - own)).sum(-1).mean())


@pytest.mark.parametrize(
    "family",
    [FAMILIES[0], *(pytest.param(name, marks=pytest.mark.exhaustive) for name in FAMILIES[1:])],
)
def test_distillation_lowers_divergence_of_written_model(quantized, tiny_model, tmp_path, family):
    """On windows that no step used. The engine that serves the model has the same divergence."""
    source, reference = quantized(family, "w3a16-sym-g32", "gptq"), tiny_model(family)
    done = distilled(source, reference, tmp_path / "out")
    assert done.trained.after < 0.99 * done.trained.before
    found = engine_divergence(tmp_path / "out", reference)
    assert found == pytest.approx(done.trained.after, rel=0.02)
    assert engine_divergence(source, reference) == pytest.approx(done.trained.before, rel=0.02)


@pytest.mark.parametrize("outer", ["quantize_head", "quantize_embedding"])
def test_quantized_head_and_embedding_keep_their_codes(quantized, tiny_model, tmp_path, outer):
    """The student predicts with these codes, so the engine has the same divergence."""
    settings = {outer: Scheme.parse("w8a16-sym-g32")}
    source = quantized("qwen3", "w3a16-sym-g32", "compressed-tensors", **settings)
    done = distilled(source, tiny_model("qwen3"), tmp_path / "out")
    found = engine_divergence(tmp_path / "out", tiny_model("qwen3"))
    assert found == pytest.approx(done.trained.after, rel=0.02)
    assert done.trained.after < done.trained.before
    before, after = (load_file(each / "model.safetensors") for each in (source, tmp_path / "out"))
    module = "lm_head." if outer == "quantize_head" else "model.embed_tokens."
    names = [name for name in before if name.startswith(module) and name.endswith("_packed")]
    assert names and all(torch.equal(before[name], after[name]) for name in names)


@pytest.mark.parametrize(
    ("scheme", "output_format", "leaf"),
    [
        ("w4a16-sym-g32", "gptq", "scales"),
        ("w4a16-asym-g32", "awq", "scales"),
        ("w4a16-asym-g32", "compressed-tensors", "weight_scale"),
        ("w8a8", "compressed-tensors", "weight_scale"),
    ],
)
def test_only_scales_and_norms_change(quantized, tiny_model, tmp_path, scheme, output_format, leaf):
    source = quantized("qwen3", scheme, output_format)
    settings = replace(QUICK, rate=0.0001, norm_rate=0.00003) if scheme == "w8a8" else QUICK
    distilled(source, tiny_model("qwen3"), tmp_path / "out", settings)
    before, after = (load_file(path / "model.safetensors") for path in (source, tmp_path / "out"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.endswith((f".{leaf}", "norm.weight")) for name in changed)
    assert any(name.endswith(leaf) for name in changed)
    assert all(before[name].dtype == after[name].dtype for name in before)
    configs = [(path / "config.json").read_text() for path in (source, tmp_path / "out")]
    assert json.loads(configs[0]) == json.loads(configs[1])
    assert inspect_checkpoint(tmp_path / "out").ok
    quality = read_quality(tmp_path / "out")
    assert not damaged(CheckpointReader(tmp_path / "out"), quality.checksums)
    assert quality.values["distillation"]["settings"]["steps"] == QUICK.steps


@pytest.mark.parametrize(
    ("scheme", "output_format", "recipe"),
    [
        ("w3a16-sym-g32", "gptq", "rtn"),
        ("w4a16-asym-g32", "awq", "rtn"),
        ("w3a16-sym-g32", "compressed-tensors", "awq"),  # with factors in norms and rows
    ],
)
def test_codes_are_trained_on_request(
    quantized, tiny_model, tmp_path, scheme, output_format, recipe
):
    """The engine has the reported, lower divergence; the layout's other tensors stay."""
    calibrated = {} if recipe == "rtn" else {"recipe": recipe, "calibration": DATA}
    source = quantized("qwen3", scheme, output_format, **calibrated)
    settings = replace(QUICK, rate=0.003, code_rate=0.05)
    done = distilled(source, tiny_model("qwen3"), tmp_path / "out", settings)
    assert done.trained.after < 0.99 * done.trained.before
    found = engine_divergence(tmp_path / "out", tiny_model("qwen3"))
    assert found == pytest.approx(done.trained.after, rel=0.02)
    before, after = (load_file(path / "model.safetensors") for path in (source, tmp_path / "out"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(before[name].dtype == torch.int32 for name in changed)
    assert not any("embed" in name or "head" in name for name in changed)
    assert all(before[name].dtype == after[name].dtype for name in before)
    assert inspect_checkpoint(tmp_path / "out").ok
    assert not damaged(CheckpointReader(tmp_path / "out"), read_quality(tmp_path / "out").checksums)


@pytest.mark.parametrize("recipe", ["rotate", "rotate+awq+gptq"])
def test_codes_of_rotated_weights_are_trained(quantized, tiny_model, tmp_path, recipe):
    """They start at the rotated float weights. The engine finds the divergence, which is less."""
    made = {"recipe": recipe, "calibration": DATA, "seed": 3}
    source = quantized("qwen3", "w3a16-sym-g32", "gptq", **made)
    settings = replace(QUICK, rate=0.003, code_rate=0.02)
    done = distilled(source, tiny_model("qwen3"), tmp_path / "out", settings)
    assert done.trained.after < 0.99 * done.trained.before
    found = engine_divergence(tmp_path / "out", tiny_model("qwen3"))
    assert found == pytest.approx(done.trained.after, rel=0.02)
    before, after = (load_file(path / "model.safetensors") for path in (source, tmp_path / "out"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(before[name].dtype == torch.int32 for name in changed)


@pytest.mark.parametrize("fault", ["no record", "another seed"])
def test_unknown_rotation_is_refused(quantized, tiny_model, tmp_path, fault):
    made = {"recipe": "rotate", "calibration": DATA, "seed": 3}
    source = tmp_path / "source"
    shutil.copytree(quantized("qwen3", "w3a16-sym-g32", "gptq", **made), source)
    record = source / "quality.json"
    if fault == "no record":
        record.unlink()
    else:
        values = json.loads(record.read_text())
        values["seed"] = 4
        record.write_text(json.dumps(values))
    with pytest.raises(InputError, match="its codes cannot be trained: .* a transform"):
        settings = replace(QUICK, code_rate=0.02)
        distilled(source, tiny_model("qwen3"), tmp_path / "out", settings)
    assert not (tmp_path / "out").exists()


def test_act_order_keeps_its_group_index(quantized, tiny_model, tmp_path):
    source = quantized(
        "qwen3", "w4a16-sym-g32", "gptq", act_order=True, recipe="gptq", calibration=DATA
    )
    done = distilled(source, tiny_model("qwen3"), tmp_path / "out")
    assert engine_divergence(tmp_path / "out", tiny_model("qwen3")) == pytest.approx(
        done.trained.after, rel=0.02
    )


def test_training_that_increases_divergence_is_discarded(quantized, tiny_model, tmp_path):
    source = quantized("qwen3", "w8a16-sym-g32", "gptq")
    wild = TrainingSettings(steps=2, tokens=48, rate=5.0, norm_rate=5.0)
    done = distilled(source, tiny_model("qwen3"), tmp_path / "out", wild)
    assert done.trained.kept_step == 0 and done.trained.after == done.trained.before
    before, after = (load_file(path / "model.safetensors") for path in (source, tmp_path / "out"))
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("at", [2, 11])
def test_interrupt_writes_best_state(quantized, tiny_model, tmp_path, monkeypatch, at):
    """The first check is after step 3, the last one before the interrupt after step 9."""
    source, reference = quantized("qwen3", "w3a16-sym-g32", "gptq"), tiny_model("qwen3")
    backward, calls = Training._backward, []

    def interrupted(training, rows):
        calls.append(rows)
        if len(calls) == at:
            raise KeyboardInterrupt
        backward(training, rows)

    monkeypatch.setattr(Training, "_backward", interrupted)
    if at == 2:
        with pytest.raises(KeyboardInterrupt):
            distilled(source, reference, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return
    done = distilled(source, reference, tmp_path / "out")
    assert done.trained.steps == 10 and done.trained.kept_step in (3, 6, 9)
    assert done.trained.after < done.trained.before
    found = engine_divergence(tmp_path / "out", reference)
    assert found == pytest.approx(done.trained.after, rel=0.02)
    assert (
        read_quality(tmp_path / "out").values["distillation"]["held_out_divergence"]["steps"] == 10
    )


@pytest.mark.parametrize("scheme", ["w3a16-sym-g32", "w8a8"])
def test_gradient_equals_divergence_gradient(quantized, tiny_model, scheme):
    """Along the gradient, the divergence of the windows changes by its squared norm.

    Inputs rounded to 8 bits make steps, which the gradient passes over: of these only the sign and
    the order of magnitude are compared.
    """
    output_format = "compressed-tensors" if scheme == "w8a8" else "gptq"
    folder = quantized("qwen3", scheme, output_format)
    student, training = training_of(folder, tiny_model("qwen3"))
    windows = torch.tensor([2, 5])
    training._backward(windows)
    kinds = [kind for layer in student.layers for kind in layer.parameters()]
    parameters = [p for kind in kinds for p in kind]
    assert all(p.grad is not None and p.grad.any() for p in parameters)
    gradients = [p.grad.clone() for p in parameters]
    squared = sum(float(g.double().square().sum()) for g in gradients)
    step = 0.02 / squared**0.5
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            for p, g in zip(parameters, gradients, strict=True):
                p.copy_(sign * step * g)
        values.append(training.divergence(windows))
    slope = (values[0] - values[1]) / (2 * step)
    assert slope == pytest.approx(squared, rel=0.5 if scheme == "w8a8" else 0.02)


def test_activations_are_rounded_as_in_engine(quantized, tiny_model):
    folder = quantized("qwen3", "w8a8", "compressed-tensors")
    _, training = training_of(folder, tiny_model("qwen3"))
    want = LLM(folder, device="cpu", dtype="float32", max_model_len=64).logits(IDS[3].tolist())
    _, found = training.logits(3)
    assert float((found - want).norm() / want.norm()) < 1e-3


def test_command_writes_settings_and_quality(quantized_5m, docs_5m, tmp_path, capsys):
    target = tmp_path / "out"
    flags = ["--samples", "3", "--sequence-length", "32", "--steps", "1", "--quality-windows", "1"]
    command = ["distill", str(quantized_5m), "--against", str(docs_5m), "-o", str(target), *flags]
    assert main([*command, "--device", "cpu"]) == 0
    quality = read_quality(target)
    assert quality.to_text() in capsys.readouterr().out
    assert quality.to_text() in (target / "README.md").read_text()
    recorded = quality.values["command"].split()
    assert str(docs_5m.parent) not in quality.values["command"]
    parsed = build_parser().parse_args(recorded[1:])
    assert (parsed.steps, parsed.samples, parsed.against) == (1, 3, docs_5m.name)
    ids = torch.tensor([quality.probe.token_ids])
    llm = LLM(target, device="cpu", dtype="float32", max_model_len=64)
    assert quality.probe.distance(llm.logits(ids[0].tolist())) < 1e-3


def test_unsupported_distillations_are_refused(quantized, tiny_model, tmp_path):
    source, reference = quantized("qwen3", "w4a16-sym-g32", "gptq"), tiny_model("qwen3")
    target = tmp_path / "out"
    with pytest.raises(InputError, match="is not quantized"):
        distilled(reference, reference, target)
    with pytest.raises(InputError, match="is quantized.*give the float model"):
        distilled(source, source, target)
    floats = quantized("qwen3", "w8a8-fp8", "compressed-tensors")
    with pytest.raises(InputError, match="has no integer codes"):
        distilled(floats, reference, target)
    with pytest.raises(InputError, match="distillation runs on one device"):
        distilled(source, reference, target, device="cpu,cpu")
    one = CalibrationData(ids_WS=IDS[:1], source="random", seed=0)
    with pytest.raises(InputError, match="one more must be held out"):
        distill_checkpoint(source, reference, target, calibration=one, quality_windows=0)
    config = json.loads((reference / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    for path in reference.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 500}))
    with pytest.raises(InputError, match=r"512|500"):
        distilled(source, other, target)
    fewer = {"num_hidden_layers": 1, "layer_types": config["layer_types"][:1]}
    (other / "config.json").write_text(json.dumps({**config, **fewer}))
    with pytest.raises(InputError, match="other: has 1 layers, and .*give the float model that"):
        distilled(source, other, target)
    assert not target.exists()


def test_full_disk_is_detected_before_training(quantized, tiny_model, tmp_path, monkeypatch):
    source, reference = quantized("qwen3", "w4a16-sym-g32", "gptq"), tiny_model("qwen3")
    size = sum(entry.num_bytes for entry in CheckpointReader(source).entries.values())
    monkeypatch.setattr(Training, "run", None)  # a training would fail
    usage = shutil.disk_usage(tmp_path)._replace(free=size - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DiskError, match="out: needs .* free .free some, or give a folder on anoth"):
        distilled(source, reference, tmp_path / "deep" / "out")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(DiskError, match="is not writable"):
        distilled(source, reference, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
