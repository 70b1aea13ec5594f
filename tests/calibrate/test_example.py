"""examples/custom_framework.py does what it says."""

import subprocess
import sys
from pathlib import Path

from formats.inspect import inspect_checkpoint

ROOT = Path(__file__).parents[2]


def test_custom_framework(docs_5m, tmp_path):
    target = tmp_path / "mine"
    script = "examples/custom_framework.py"
    run = subprocess.run(
        [sys.executable, script, str(docs_5m), str(target), "--samples", "2"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    distance = float(next(line for line in lines if "from the grid" in line).split()[-1])
    assert distance < 1e-5
    errors = [
        float(line.split("output error ")[1].split()[0]) for line in lines if "%, state" in line
    ]
    assert len(errors) == 2 and max(errors) < 15
    assert inspect_checkpoint(target).problems == ()
