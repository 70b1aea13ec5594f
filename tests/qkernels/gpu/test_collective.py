"""Sums over ranks that are processes: on one GPU, which IPC handles allow, and on two."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qkernels.rowwise.spec import NormSpec

ROOT = Path(__file__).resolve().parents[3]


def checked(*arguments: str) -> str:
    """Return the output of measure_all_reduce.py's check, which ends at the first wrong bit."""
    command = [sys.executable, "examples/measure_all_reduce.py", "--check", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_of_processes_on_one_gpu(ranks):
    said = checked("--one-gpu", "--ranks", str(ranks), "--seconds", "200")
    assert "peer memory by cuda_ipc" in said and "bitwise equal on all ranks" in said


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_sums_of_processes_on_separate_gpus(ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    said = checked("--ranks", str(ranks), "--seconds", "200")
    assert "bitwise equal on all ranks" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run compiled here")
@pytest.mark.exhaustive
def test_measurement_script_runs_in_interpreter(tmp_path):
    """All of its Python, so that it works at the first try where there are GPUs."""
    command = [sys.executable, "examples/measure_all_reduce.py", "--tiny"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    file = tmp_path / "all_reduce.json"
    result = subprocess.run(
        [*command, "--json", str(file)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "bitwise equal" in result.stdout and "one_shot" in file.read_text()


@pytest.mark.gpu
def test_lost_rank_ends_wait():
    """And `abort` does, from another thread, whatever the limit."""
    from qkernels.collective import ops
    from qkernels.collective.channels import PeerLayout, PeerLostError, Peers
    from qkernels.collective.config import KIB, Limits
    from tests.qkernels.virtual_ranks import virtual_ranks

    device = torch.device("cuda", 0)
    layout = PeerLayout.of_model(2, 1024, Limits(one_shot=64 * KIB, two_shot=64 * KIB, rows=8))
    x = torch.ones(1, 1024, dtype=torch.bfloat16, device=device)
    peers = Peers(virtual_ranks(2, layout.num_bytes, device)[0], layout, spin_limit=1000)
    ops.all_reduce(x, peers)
    torch.cuda.synchronize()
    with pytest.raises(PeerLostError, match="rank 1 did not send its data"):
        peers.check()

    waiting = Peers(virtual_ranks(2, layout.num_bytes, device)[0], layout)
    ops.all_reduce_norm(x, x, NormSpec(weight_C=x[0], eps=1e-5), waiting)
    done = torch.cuda.Event()
    done.record()
    assert not done.query()
    waiting.abort()
    torch.cuda.synchronize()
    waiting.check()
