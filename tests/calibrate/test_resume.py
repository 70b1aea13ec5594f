"""A killed run goes on where it was, with the same bytes; a changed setting is noticed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from calibrate import gptq
from calibrate.pipeline import quantize_checkpoint
from calibrate.recipe import RECIPES, Recipe
from formats.errors import CheckpointError, InputError
from formats.scheme import Scheme

ROOT = Path(__file__).parents[2]
SCHEME = Scheme.parse("w4a16-sym")
OPTIONS = {"samples": 2, "sequence_length": 64, "scheme": SCHEME, "progress": False}
# A recipe with every kind of transform; killed in the third layer, or at its last journal entry.
KILLED = """
import os, signal, sys
from calibrate import gptq, journal, pipeline, recipe
from formats.scheme import Scheme
calls = []
def solve(*arguments):
    calls.append(1)
    if len(calls) == 17:
        os.kill(os.getpid(), signal.SIGKILL)
    return gptq.solve(*arguments)
row = recipe.RECIPES["rotate+awq+gptq"]
pipeline.quantize_checkpoint(
    sys.argv[1], sys.argv[2], scheme=Scheme.parse("w4a16-sym"), progress=False,
    samples=2, sequence_length=64,
    recipe=recipe.Recipe(name=row.name, solver=solve, transforms=row.transforms),
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


def test_finished_layers_are_on_disk_and_a_changed_setting_is_noticed(killed, docs_5m):
    layers = sorted(path.name for path in unfinished(killed).glob("layer-*"))
    assert layers == ["layer-00000.safetensors", "layer-00001.safetensors"]
    for change, named in (({"seed": 1}, "calibration"), ({"recipe": "gptq"}, "recipe")):
        options = {**OPTIONS, "recipe": "rotate+awq+gptq", **change}
        with pytest.raises(InputError, match=f"unfinished run had {named}.*delete this folder"):
            quantize_checkpoint(docs_5m, killed, **options)
    assert sorted(path.name for path in unfinished(killed).glob("layer-*")) == layers


def test_resumed_run_writes_the_same_bytes(killed, docs_5m, tmp_path):
    row, solved = RECIPES["rotate+awq+gptq"], []

    def counting(weight, stats, spec, name):
        solved.append(name)
        return gptq.solve(weight, stats, spec, name)

    counted = Recipe(name=row.name, solver=counting, transforms=row.transforms)
    quantize_checkpoint(docs_5m, killed, recipe=counted, **OPTIONS)
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


def test_damaged_layer_is_refused(docs_5m, tmp_path):
    target = tmp_path / "out"

    def stop(weight, stats, spec, name):
        if "layers.1" in name:
            raise KeyboardInterrupt
        return gptq.solve(weight, stats, spec, name)

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(docs_5m, target, recipe=Recipe(name="mine", solver=stop), **OPTIONS)
    path = unfinished(target) / "layer-00000.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="layer-00000.*damaged"):
        quantize_checkpoint(
            docs_5m, target, recipe=Recipe(name="mine", solver=gptq.solve), **OPTIONS
        )
