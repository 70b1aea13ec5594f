"""One process describes kernels, workers compile them, and the first finds them; without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from qkernels.gpu import compile_jobs

ROOT = Path(__file__).resolve().parents[3]
QUICK = ("norm", "silu", "norm to limbs", "sampling", "w4a16-sym of adapters M=1 split qkv")


def run(folder, *names):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.qkernels.compile.job_cases", str(folder), *names]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.exhaustive
def test_compile_workers_fill_launch_cache(tmp_path):
    found = run(tmp_path, *QUICK)
    assert found["jobs"] == found["kernels"] >= len(QUICK) and not found["refused"]
    assert found["compiled"] == found["jobs"] + 1, "one that fails does not hold up the others"
    assert found["entries"] == found["entries_after"] == found["jobs"]
    assert found["missing_again"] == 0 and found["processes_again"] == 0


@pytest.mark.exhaustive
def test_launches_are_described_as_jobs(tmp_path):
    found = run(tmp_path)
    assert found["jobs"] > 100 and not found["refused"]


@pytest.mark.parametrize("module", ["os", "tests.qkernels", "qkernelsx.gpu"])
def test_compile_job_refuses_foreign_imports(module):
    job = {"module": module, "kernel": "system", "arguments": [], "constants": {}}
    with pytest.raises(compile_jobs.NotDescribable, match=f"may not name module {module}"):
        compile_jobs.compile_job(json.dumps(job))


def test_compile_job_refuses_unknown_value():
    with pytest.raises(compile_jobs.NotDescribable, match="cannot hold builtins:object"):
        compile_jobs._encode({"x": object()}["x"])
