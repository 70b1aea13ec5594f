"""Sweeps, their curves, and the side-by-side table, on a scripted server."""

import csv
import json
import subprocess
import sys

import pytest

from qserve.bench.serving.sweep import command_of
from qserve.bench.serving.sweep_plot import curves, frontier, pareto_points, read_results
from qserve.cli import main
from tests.qserve.bench.serving.scripted_server import scripted_server


@pytest.fixture(scope="module")
def server():
    with scripted_server() as running:
        running.first = running.gap = 0.001
        yield running


def sweep(server, tmp_path, *flags):
    command = f"qserve bench serve --base-url {server.url} --num-prompts 2 --random-input-len 3"
    where = ["--output-dir", str(tmp_path), "--experiment-name", "x"]
    return main(["bench", "sweep", "serve", "--bench-cmd", command, *where, *flags])


def test_every_combination_has_its_folder(server, tmp_path, capsys):
    flags = ["--workload-var", "max_concurrency", "--workload-values", "1,2", "--num-runs", "1"]
    assert sweep(server, tmp_path, *flags, "--dry-run") == 0
    assert capsys.readouterr().out.count("--max-concurrency") == 2 and not server.bodies
    assert sweep(server, tmp_path, *flags) == 0
    found = sorted(path.parent.name for path in tmp_path.glob("x/*/run=0.json"))
    assert found == ["max_concurrency=1", "max_concurrency=2"]
    with (tmp_path / "x" / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["max_concurrency"]) for row in rows] == [1, 2]
    assert all(float(row["completed"]) == 2 for row in rows)
    asked = len(server.bodies)
    assert sweep(server, tmp_path, *flags, "--resume") == 0
    assert len(server.bodies) == asked, "runs that are there are kept"
    assert len(read_results(str(tmp_path / "x"))) == 2


def test_flags_of_a_combination():
    params = {"max_num_seqs": 8, "enforce-eager": True, "chat": False}
    words = command_of("qserve serve m", params)
    assert words[1:] == ["-m", "qserve", "serve", "m", "--max-num-seqs", "8", "--enforce-eager"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--bench-cmd", ""], "--bench-cmd: expected a command, found none"),
        (["--bench-cmd", "qserve 'x"], "--bench-cmd: cannot be read as a command: No closing"),
        (["--serve-cmd", " "], "--serve-cmd: expected a command, found none"),
        (["--after-bench-cmd", "false"], "--after-bench-cmd: ended with exit code 1"),
        (["--serve-cmd", "qserve serve m --port=x"], "expected a number after --port, found 'x'"),
    ],
)
def test_failing_commands_are_reported(server, tmp_path, capsys, flags, message):
    assert sweep(server, tmp_path, "--num-runs", "1", *flags) == 1
    assert message in capsys.readouterr().err


def test_port_in_use_is_refused(server, tmp_path, capsys):
    port = server.url.rpartition(":")[2].strip("/")
    assert sweep(server, tmp_path, "--serve-cmd", f"qserve serve m --port {port}") == 1
    assert f"--serve-cmd: port {port} is in use" in capsys.readouterr().err


def test_failed_runs_are_counted(tmp_path, capsys):
    where = ["--output-dir", str(tmp_path), "--num-runs", "2"]
    assert main(["bench", "sweep", "serve", "--bench-cmd", "false", *where]) == 1
    assert "2 runs failed or wrote no result" in capsys.readouterr().err


def test_latency_curves_and_pareto_frontier():
    rows = [
        {"label": "a", "request_rate": 8, "median_tpot_ms": 10, "output_throughput": 800},
        {"label": "a", "request_rate": 2, "median_tpot_ms": 5, "output_throughput": 300},
        {"label": "a", "request_rate": "inf", "median_tpot_ms": 20, "output_throughput": 700},
    ]
    found = curves(rows, "label", "request_rate", "median_tpot_ms")
    assert found == {"a": [(2, 5), (8, 10)]}
    points = pareto_points(rows, gpus=2)
    assert points == [(100, 400), (200, 150), (50, 350)]
    assert frontier(points) == [(100, 400), (200, 150)]


def test_results_side_by_side(server, tmp_path):
    out = tmp_path / "all.json"
    command = [sys.executable, "examples/compare.py", f"a={server.url}", f"b={server.url}"]
    command += ["--runs", "1", "--json", str(out), "--", "--num-prompts", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "| | a | b | a / b |" in done.stdout and "| TTFT median, ms |" in done.stdout
    assert {name: len(runs) for name, runs in json.loads(out.read_text()).items()} == {
        "a": 1,
        "b": 1,
    }


def test_unknown_result_key_is_refused(tmp_path, capsys):
    (tmp_path / "r.json").write_text('{"label": "a", "request_rate": 2.0, "mean_ttft_ms": 3}')
    assert main(["bench", "sweep", "plot", str(tmp_path), "--y", "ttft"]) == 1
    words = "--y: no result has ttft (choose among mean_ttft_ms, request_rate)"
    assert words in capsys.readouterr().err
