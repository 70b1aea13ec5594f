"""examples/custom_framework.py does what it says."""

import subprocess
import sys
from pathlib import Path

import pytest

from formats.inspection.inspect import inspect_checkpoint
from qserve.llm import LLM
from qserve.params.sampling_params import SamplingParams

ROOT = Path(__file__).parents[2]


def run_example(model, target):
    return subprocess.run(
        [sys.executable, "examples/custom_framework.py", str(model), str(target), "--samples", "2"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def test_existing_target_gives_one_line_error(docs_5m, tmp_path):
    (tmp_path / "mine").touch()
    run = run_example(docs_5m, tmp_path)
    assert run.returncode == 1 and "Traceback" not in run.stderr
    last = run.stderr.splitlines()[-1]
    assert last.startswith(f"custom_framework.py: {tmp_path}: already exists")


@pytest.mark.exhaustive
def test_custom_framework_example_writes_valid_folder(docs_5m, tmp_path):
    target = tmp_path / "mine"
    run = run_example(docs_5m, target)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    distance = float(next(line for line in lines if "from your grid" in line).split()[-1])
    assert distance < 1e-5
    layers = [line for line in lines if "%, state" in line]
    errors = [float(line.split("output error ")[1].split()[0]) for line in layers]
    steps = [float(line.split(" steps from")[0].split()[-1]) for line in layers]
    assert len(errors) == 3 and max(errors) < 15
    assert steps[0] == 0 and 0.5 < steps[2] < 3
    assert inspect_checkpoint(target).problems == ()

    served, reference = (
        LLM(folder, device="cpu", max_model_len=128) for folder in (target, docs_5m)
    )
    output = served.generate("A trait object", SamplingParams(temperature=0, max_tokens=8))[0]
    assert len(output.outputs[0].token_ids) == 8 and output.outputs[0].text.strip()
    ids = output.prompt_token_ids + output.outputs[0].token_ids
    found, want = served.logits(ids), reference.logits(ids)
    assert (found - want).norm() / want.norm() < 0.15
