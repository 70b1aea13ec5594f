"""`qserve bench forward` and `qserve profile` of a sharded model: every rank runs."""

import json

import pytest
import torch

from qserve.cli import main
from qserve.engine.step.step_input import StepInput
from qserve.params.sampling_params import SamplingParams
from qserve.profile.chrome_trace import read_trace
from tests.qserve.parallel.engines import start

MODEL = "examples/models/docs-5m"
ENGINE = ["--device", "cpu", "--cpu-kv-cache-memory", "0.02", "--max-num-seqs", "8"]
SHARES = {
    "tensor": ["--tensor-parallel-size", "2"],
    "stages": ["--pipeline-parallel-size", "2"],
}
pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize("shares", SHARES)
def test_forward(shares, tmp_path, capsys):
    out = tmp_path / "forward.json"
    flags = ["--case", "mix=8,2*1@9", "verify=2*3@8:2", "--iters", "2", "--samples", "2"]
    flags += ["--output-json", str(out), "--profile-dir", str(tmp_path)]
    for _ in range(2):  # the first has ended its ranks
        assert main(["bench", "forward", MODEL, *ENGINE, *SHARES[shares], *flags]) == 0
    assert "[forward] verify: 2 reqs, 6 tokens, median " in capsys.readouterr().out
    found = json.loads(out.read_text())["cases"]
    assert [each["case"] for each in found] == ["mix", "verify"]
    assert all(each["median_us"] > 0 and each["graph"] == "none" for each in found)
    names = {each["name"] for each in read_trace(tmp_path / "mix.rank0.trace.json.gz")}
    assert "layer 0" in names and ("layer 2" in names) == (shares == "tensor")


@pytest.mark.parametrize("shares", SHARES)
def test_profile(shares, tmp_path, capsys):
    flags = ["--case", "decode=2*1@8", "--iters", "2", "--profile-dir", str(tmp_path)]
    assert main(["profile", MODEL, *ENGINE, *SHARES[shares], *flags]) == 0
    shown = capsys.readouterr().out
    assert "2 steps" in shown and "products" in shown and "attention" in shown


def test_replay_equals_step_on_every_rank(tiny_model, many):
    """On every rank: their sums would be others if one ran another step, or none."""
    folder, ids = tiny_model("llama"), [5, 60, 7, 8, 90, 10]
    step = StepInput.of_sequence(ids, [1], page_size=16, params=SamplingParams())
    want = start(folder).logits(ids)[-1]
    workers = many(folder, 2).engine.workers
    found = []
    forward = workers.runner.forward_logits
    workers.runner.forward_logits = lambda *given: found.append(forward(*given))
    assert workers.prepare_replay(step) == "none"
    workers.run_replay(3)
    assert len(found) == 3
    for outputs in found:
        torch.testing.assert_close(outputs.logits_SV[0], want, atol=1e-4, rtol=1e-4)
