"""Run the kernel tests in Triton's interpreter, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
TESTS = HERE.parent
ROOT = TESTS.parent.parent
# The longest first, which are dealt out in turn: parts then take about as long.
FILES = sorted(
    (
        path
        for path in (*HERE.glob("test_*.py"), TESTS / "fuzz" / "test_kernels.py")
        if path != Path(__file__)
    ),
    key=lambda path: (-path.stat().st_size, path.name),
)
NUM_PROCESSES = 2  # each takes some seconds to start


@pytest.mark.exhaustive(every_part=True)  # a minute of one core
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel tests run compiled here")
@pytest.mark.parametrize("part", range(NUM_PROCESSES))
def test_kernels_in_the_interpreter(part, pytestconfig):
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    environment.pop("PYTEST_ADDOPTS", None)
    files = map(str, FILES[part::NUM_PROCESSES])
    command = [sys.executable, "-m", "pytest", *files, "-x", "-p", "no:cacheprovider"]
    share = pytestconfig.getoption("--exhaustive-part")
    if share:
        command += ["--exhaustive-part", share]
    elif pytestconfig.getoption("--exhaustive"):
        command.append("--exhaustive")
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout and "skipped" not in result.stdout, result.stdout[-2000:]
