"""A killed run resumes and writes the same bytes; changed settings are detected."""

import errno
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from calibrate.pipeline import quantize_checkpoint
from calibrate.recipe import RECIPES, Recipe, identity_of, with_act_order
from calibrate.solvers import gptq, rtn
from calibrate.solvers.column_order import ORDERS
from calibrate.solvers.solving import Transform, Tuning
from formats.checkpoint import CheckpointReader, CheckpointWriter
from formats.errors import CheckpointError, DiskError, InputError
from formats.scheme import Scheme

ROOT = Path(__file__).parents[3]
SCHEME = Scheme.parse("w4a16-sym")
OPTIONS = {"samples": 2, "sequence_length": 64, "scheme": SCHEME, "progress": False}
# A recipe with every kind of transform; killed in the third layer, or at its last journal entry.
KILLED = """
import dataclasses, os, signal, sys
from calibrate.solvers import gptq
from calibrate.resume import journal
from calibrate import pipeline, recipe
from formats.scheme import Scheme
calls = []
def solve(*arguments):
    calls.append(1)
    if len(calls) == 17:
        os.kill(os.getpid(), signal.SIGKILL)
    return gptq.solve(*arguments)
row = recipe.RECIPES["rotate+awq+gptq"]
recipe.RECIPES[row.name] = dataclasses.replace(row, solver=solve)
pipeline.quantize_checkpoint(
    sys.argv[1], sys.argv[2], scheme=Scheme.parse("w4a16-sym"), progress=False,
    samples=2, sequence_length=64, recipe=row.name,
)
"""


@pytest.fixture(scope="module")
def killed(docs_5m, tmp_path_factory) -> Path:
    """The target of a run that was killed in its third layer."""
    target = tmp_path_factory.mktemp("killed") / "out"
    run = subprocess.run(
        [sys.executable, "-c", KILLED, str(docs_5m), str(target)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    assert run.returncode == -signal.SIGKILL
    assert not target.exists()
    return target


def unfinished(target: Path) -> Path:
    return target.parent / f".{target.name}.unfinished"


def test_finished_layers_are_on_disk_and_changed_setting_is_refused(killed, docs_5m):
    layers = sorted(path.name for path in unfinished(killed).glob("layer-*"))
    assert layers == ["layer-00000.safetensors", "layer-00001.safetensors"]
    last = "model.layers.3.mlp.down_proj"
    for change, named in (
        ({"seed": 1}, "calibration seed 0; this run has 1"),
        ({"samples": 1}, "calibration windows 2; this run has 1"),
        # Not "calibration", which a user who changed the recipe or the scheme did not touch
        ({"recipe": "rtn"}, r"recipe 'rotate\+awq\+gptq'; this run has 'rtn'"),
        (
            {"recipe": "rtn", "scheme": Scheme.parse("w8a16-sym")},
            "schemes model.layers.0.self_attn.q_proj 'w4a16-sym'; this run has 'w8a16-sym'",
        ),
        ({"recipe": "gptq"}, r"recipe 'rotate\+awq\+gptq'; this run has 'gptq'"),
        ({"ignore": [last]}, f"schemes {last} 'w4a16-sym'; this run has None"),
        ({"overrides": [(last, Scheme.parse("w8a16-sym"))]}, f"schemes {last} .* 'w8a16-sym'"),
        (
            {"kv_cache": "int8", "output_format": "compressed-tensors"},
            "kv_cache None; this run has 'int8'",
        ),
    ):
        options = {**OPTIONS, "recipe": "rotate+awq+gptq", **change}
        with pytest.raises(InputError, match=f"unfinished run with {named}.*delete this folder"):
            quantize_checkpoint(docs_5m, killed, **options)
    assert sorted(path.name for path in unfinished(killed).glob("layer-*")) == layers


def test_run_that_finished_no_layer_does_not_block_other_settings(docs_5m, tmp_path):
    def fail(weight, stats, spec, name):
        raise RuntimeError("of the first linear")

    target = tmp_path / "out"
    with pytest.raises(RuntimeError):
        quantize_checkpoint(
            docs_5m, target, recipe=Recipe(name="mine", solver=fail, version="1"), **OPTIONS
        )
    assert not unfinished(target).exists()
    unfinished(target).mkdir()  # of a run that was killed
    (unfinished(target) / "journal.json").write_text('{"recipe": "gptq", "seed": 5}')
    quantize_checkpoint(docs_5m, target, **{**OPTIONS, "recipe": "rtn"})
    assert not unfinished(target).exists() and (target / "config.json").exists()


@pytest.fixture
def other_weights(docs_5m, tmp_path):
    """Return a function: name -> the model with one weight of that tensor changed, mtime kept."""

    def make(name: str) -> Path:
        folder = tmp_path / "other"
        shutil.copytree(docs_5m, folder)
        entry = CheckpointReader(folder).entries[name]
        before = entry.file.stat()
        with entry.file.open("r+b") as file:
            file.seek(entry.offset)
            byte = file.read(1)
            file.seek(entry.offset)
            file.write(bytes([byte[0] ^ 1]))
        os.utime(entry.file, ns=(before.st_atime_ns, before.st_mtime_ns))
        return folder

    return make


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.embed_tokens.weight", "unfinished run with model"),
        ("model.layers.1.mlp.up_proj.weight", "with other weights in layer 1"),
        ("model.layers.0.input_layernorm.weight", "with other weights in layer 0"),
    ],
)
def test_changed_source_weight_is_refused(killed, other_weights, name, message):
    layers = sorted(unfinished(killed).iterdir())
    with pytest.raises(InputError, match=f"{message}.*delete this folder"):
        quantize_checkpoint(other_weights(name), killed, recipe="rotate+awq+gptq", **OPTIONS)
    assert sorted(unfinished(killed).iterdir()) == layers, "the work of the first run must stay"


def test_concurrent_run_is_refused_and_keeps_first_runs_layers(killed, docs_5m):
    layers = sorted(unfinished(killed).iterdir())
    with (
        CheckpointWriter(killed),
        pytest.raises(InputError, match="out: another run is writing it"),
    ):
        quantize_checkpoint(docs_5m, killed, recipe="rotate+awq+gptq", **OPTIONS)
    assert sorted(unfinished(killed).iterdir()) == layers


@pytest.mark.exhaustive
def test_resumed_run_writes_the_same_bytes(killed, docs_5m, tmp_path, monkeypatch):
    row, solved = RECIPES["rotate+awq+gptq"], []

    def counting(weight, stats, spec, name):
        solved.append(name)
        return gptq.solve(weight, stats, spec, name)

    monkeypatch.setitem(RECIPES, row.name, replace(row, solver=counting))
    quantize_checkpoint(docs_5m, killed, recipe=row.name, **OPTIONS)
    assert len(solved) == 14 and solved[0] == "model.layers.2.self_attn.q_proj"
    quantize_checkpoint(docs_5m, tmp_path / "whole", recipe=row, **OPTIONS)
    for name in ("model.safetensors", "config.json", "quantize_config.json"):
        assert (killed / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    config = json.loads((killed / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    resumed, whole = (
        json.loads((folder / "quantization_report.json").read_text())
        for folder in (killed, tmp_path / "whole")
    )
    for left, right in zip(resumed["linears"], whole["linears"], strict=True):
        assert {**left, "seconds": 0} == {**right, "seconds": 0}
    assert "lm_head.weight is written" in " ".join(resumed["warnings"])
    assert not unfinished(killed).exists()
    assert resumed["source_sha256"] == whole["source_sha256"]


def test_damaged_layer_is_refused(docs_5m, tmp_path):
    target = tmp_path / "out"

    def stop(weight, stats, spec, name):
        if "layers.1" in name:
            raise KeyboardInterrupt
        return gptq.solve(weight, stats, spec, name)

    recipe = Recipe(name="mine", solver=stop, version="1")
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(docs_5m, target, recipe=recipe, **OPTIONS)
    path = unfinished(target) / "layer-00000.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="layer-00000.*damaged.*delete .*unfinished"):
        quantize_checkpoint(docs_5m, target, recipe=recipe, **OPTIONS)
    assert path.exists(), "the message asks the user to delete it"


@pytest.mark.parametrize(
    "where",
    [pytest.param("calibrate.resume.journal", marks=pytest.mark.exhaustive), "formats.checkpoint"],
)
def test_full_disk_keeps_finished_layers(docs_5m, tmp_path, monkeypatch, where):
    target, calls = tmp_path / "out", []
    module = importlib.import_module(where)
    original = module.save_file

    def save_file(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(*arguments, **options)

    monkeypatch.setattr(module, "save_file", save_file)
    options = {**OPTIONS, "recipe": "gptq", "max_shard_bytes": 10**6}
    with pytest.raises(DiskError, match="No space left on device.*free space on the disk"):
        quantize_checkpoint(docs_5m, target, **options)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == [unfinished(target).name]
    # a folder for hidden states that cannot be used is no reason to start again either
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="`spill` .*file/x: cannot hold .* Not a directory"):
        quantize_checkpoint(docs_5m, target, spill=tmp_path / "file" / "x", **options)
    solved = []

    def solve(*arguments):
        solved.append(1)
        return gptq.solve(*arguments)

    monkeypatch.setitem(RECIPES, "gptq", replace(RECIPES["gptq"], solver=solve))
    quantize_checkpoint(docs_5m, target, **options)
    assert len(solved) < 28 - 7 and not unfinished(target).exists()
    quantize_checkpoint(docs_5m, tmp_path / "fresh", **options)
    for path in target.glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "fresh" / path.name).read_bytes()


def test_failed_verification_keeps_solved_layers(docs_5m, tmp_path, monkeypatch, caplog):
    target, seal = tmp_path / "out", CheckpointWriter.seal

    def damaged(self, *arguments, **options):
        """Simulate a disk that returns other codes than were written."""
        staged = seal(self, *arguments, **options)
        entry = CheckpointReader(staged).entries["model.layers.2.mlp.up_proj.qweight"]
        with entry.file.open("r+b") as file:
            file.seek(entry.offset)
            byte = file.read(1)
            file.seek(entry.offset)
            file.write(bytes([byte[0] ^ 1]))
        return staged

    monkeypatch.setattr(CheckpointWriter, "seal", damaged)
    with pytest.raises(CheckpointError, match="up_proj: its codes differ .*same command again"):
        quantize_checkpoint(docs_5m, target, recipe="gptq", **OPTIONS)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == [unfinished(target).name]
    assert f"{unfinished(target)} keeps the finished layers: run the same command" in caplog.text

    def solve(*arguments):
        raise AssertionError("all layers were solved")

    monkeypatch.setitem(RECIPES, "gptq", replace(RECIPES["gptq"], solver=solve))
    quantize_checkpoint(docs_5m, target, recipe="gptq", **OPTIONS)
    monkeypatch.undo()
    assert not unfinished(target).exists()
    quantize_checkpoint(docs_5m, tmp_path / "whole", recipe="gptq", **OPTIONS)
    for path in target.glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "whole" / path.name).read_bytes()


def test_disk_full_at_start_leaves_no_files(docs_5m, tmp_path, monkeypatch):
    def write_bytes(self, content):
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with pytest.raises(
        DiskError, match="unfinished: cannot be created: No space left.*free space on the disk"
    ):
        quantize_checkpoint(docs_5m, tmp_path / "out", recipe="rtn", **OPTIONS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("layers", [0, 2])
def test_interrupted_run_reports_kept_layers(docs_5m, tmp_path, caplog, layers):
    calls = []

    def solve(*arguments):
        calls.append(1)
        if len(calls) > 7 * layers:
            raise KeyboardInterrupt
        return gptq.solve(*arguments)

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(
            docs_5m,
            tmp_path / "out",
            recipe=Recipe(name="mine", solver=solve, version="1"),
            **OPTIONS,
        )
    said = f"{unfinished(tmp_path / 'out')} keeps the finished layers: run the same command again"
    assert (said in caplog.text) == bool(layers)


def _own(weight_factor=1.0, stops=False, **settings) -> Recipe:
    """Return a custom solver, which may be interrupted in layer 1."""

    def solve(weight, stats, spec, name):
        if "layers.1" in name and stops:
            raise KeyboardInterrupt
        return rtn.solve(weight * weight_factor, stats, spec, name)

    return Recipe(name="mine", solver=solve, needs_data=False, **settings)


def test_custom_solver_resumes_by_version(docs_5m, tmp_path):
    target, whole = tmp_path / "out", tmp_path / "whole"
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(docs_5m, target, recipe=_own(stops=True, version="1"), **OPTIONS)
    first = unfinished(target) / "layer-00000.safetensors"
    for changed in (_own(0.5, version="2"), _own(0.5)):
        with pytest.raises(InputError, match="with recipe 'mine, version 1'; this run has "):
            quantize_checkpoint(docs_5m, target, recipe=changed, **OPTIONS)
        assert first.exists()
    inode = first.stat().st_ino
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(docs_5m, target, recipe=_own(stops=True, version="1"), **OPTIONS)
    assert first.stat().st_ino == inode, "layer 0 was solved again"
    quantize_checkpoint(docs_5m, target, recipe=_own(version="1"), **OPTIONS)
    quantize_checkpoint(docs_5m, whole, recipe=_own(), **OPTIONS)
    for path in target.glob("*.safetensors"):
        assert path.read_bytes() == (whole / path.name).read_bytes()


def test_resumed_run_reports_notes_of_finished_layers(docs_5m, tmp_path, caplog):
    """Layer 0 was finished by the first run, whose transform ran there only once."""
    target, seen = tmp_path / "out", []

    def note(state, statistics, context):
        seen.append(context.prefix)
        context.notes.append(f"norms {len(seen)} kept")
        return {}

    own = {"transforms": (Transform(name="note", on_statistics=note),), "version": "1"}
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(docs_5m, target, recipe=_own(stops=True, **own), **OPTIONS)
    assert seen == ["model.layers.0", "model.layers.1"]
    report = quantize_checkpoint(docs_5m, target, recipe=_own(**own), **OPTIONS)
    assert seen.count("model.layers.0") == 1, "layer 0 was solved again"
    notes = [warning for warning in report.warnings if "norms" in warning]
    expected = [f"{prefix}: norms {i} kept" for i, prefix in enumerate(seen, 1) if i != 2]
    assert notes == expected and len(notes) == len(set(seen))
    written = json.loads((target / "quantization_report.json").read_text())
    assert written["warnings"] == list(report.warnings)
    assert all(note in caplog.text and note in report.to_text() for note in notes)


def test_custom_solver_without_version_restarts(docs_5m, tmp_path, caplog):
    """It also discards the layers of a killed run."""
    target = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(docs_5m, target, recipe=_own(stops=True), **OPTIONS)
    assert not unfinished(target).exists() and "keeps the finished layers" not in caplog.text
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(docs_5m, target, recipe=_own(stops=True, version="1"), **OPTIONS)
    journal = unfinished(target) / "journal.json"
    journal.write_text(json.dumps(json.loads(journal.read_text()) | {"recipe": None}))
    quantize_checkpoint(docs_5m, target, recipe=_own(0.5), **OPTIONS)
    quantize_checkpoint(docs_5m, tmp_path / "whole", recipe=_own(0.5), **OPTIONS)
    for path in target.glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "whole" / path.name).read_bytes()


def test_built_in_recipes_identified_by_name_and_custom_by_version():
    row = RECIPES["smoothquant"]
    assert identity_of(row) == "smoothquant"
    assert identity_of(with_act_order(RECIPES["gptq"])) == "gptq, act-order"
    refining = with_act_order(RECIPES["gptaq+refine"])
    assert identity_of(refining) == "gptaq+refine, act-order"
    assert identity_of(replace(RECIPES["gptaq+refine"], solver=RECIPES["gptaq"].solver)) is None
    with pytest.raises(InputError, match="does not support act-order"):
        with_act_order(refining)
    others = [
        Recipe(name="smoothquant", solver=gptq.solve),
        replace(RECIPES["gptq"], solver=partial(gptq.solve, order=ORDERS["static"])),
        replace(RECIPES["gptq"], solver=partial(gptq.solve, order=ORDERS["act-order"])),
        replace(with_act_order(RECIPES["gptq"]), corrects=True),
        replace(RECIPES["autoround"], tuning=Tuning(steps=2)),
    ]
    assert [identity_of(each) for each in others] == [None] * len(others)
    found = {identity_of(replace(each, version="1")) for each in (*others[::2], others[3])}
    found |= {identity_of(replace(RECIPES["autoround"], tuning=Tuning(steps=3), version="1"))}
    assert len(found) == 5


def test_gguf_run_resumes(docs_5m, tmp_path, monkeypatch):
    """Finished layers are read back, and the file equals that of an uninterrupted run."""
    from calibrate.gguf_file import quantize_to_gguf
    from calibrate.run import layers

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    solve, solved = layers.quantize_layer, []

    def interrupted(*arguments, context, **settings):
        solved.append(context.layer)
        if len(solved) == 3:
            raise DiskError("disk", "is full")
        return solve(*arguments, context=context, **settings)

    monkeypatch.setattr(layers, "quantize_layer", interrupted)
    whole, target = tmp_path / "whole.gguf", tmp_path / "out.gguf"
    options = {"scheme": "q4_k_m", "recipe": "rtn", "progress": False, "quality_windows": 0}
    with pytest.raises(DiskError):
        quantize_to_gguf(docs_5m, target, **options)
    quantize_to_gguf(docs_5m, target, **options)
    assert solved == [0, 1, 2, 2, 3]
    quantize_to_gguf(docs_5m, whole, **options)
    tensors = [CheckpointReader(file, as_floats=True) for file in (target, whole)]
    for name in tensors[1].entries:
        assert torch.equal(*(reader.get(name) for reader in tensors)), name
