"""The measuring programs of examples/ run, on a CPU with the smallest shape."""

import json
import re
import runpy
import shutil
import socket
import subprocess
import sys

import pytest
import torch

FEW = "--repeats 1 --output 8"
COMMANDS = {
    "measure_agent": "--shape tiny-hybrid --float --turns 4 --tokens 1500 --first 400 --output 16"
    " --branch 80 --chats 2",
    "measure_disaggregated": "--device cpu --shape tiny --input 300 --output 4 --requests 4"
    " --max-num-seqs 4",
    "measure_embeddings": "--shape tiny --lengths 32 64 --tokens 256 --repeats 1",
    "measure_engine": f"--shape tiny --schemes w8a8 --max-batch 1 {FEW}"
    ' --requests 4 --request-input 32 --request-output 8 --engine {"max_model_len":512}',
    "measure_kv_transfer": "--shape tiny --folder FOLDER/kv --tokens 64 --dtypes int8 --repeats 1",
    "measure_latent_attention": "--device cpu --tiny --repeats 1",
    "measure_new_mixers": "--device cpu --tiny --repeats 1",
    "measure_lora": f"--shape tiny --max-loras 2 --max-batch 1 {FEW}",
    "measure_prefix_cache": f"--shape tiny {FEW} --requests 4 --unique-tokens 64"
    " --shared-requests 4 --system-tokens 64 --chats 2 --turns 2 --turn-tokens 32",
    "compare_published": "--device cpu --shape tiny --schemes w8a8 --cases 128/128 --requests 4"
    ' --max-num-seqs 4 --engine {"cpu_kv_cache_memory":0.2}',
    "measure_parallel": "--device cpu --shape tiny --max-model-len 256 --batches 1 --requests 2"
    " --repeats 1 --output 4 --parts check-tp2 70b-tp2-pp2 8b-tp1",
    "measure_overlap": "--device cpu",
    "parallel_floors": "--shape qwen3-30b-a3b llama-3-8b --batches 1 8",
    "measure_sleep": "--shape tiny --repeats 1 --skip switch -- --max-model-len 256",
    "measure_speculation": f"--shape tiny --heads 4 --num-drafts 3 --batch 1 2 --input 16 {FEW}",
    "measure_start": "--shape tiny --offline --warm 1",
}


NEED_GPU = (
    "measure_disaggregated",
    "measure_expert_lora",
    "measure_expert_shards",
    "measure_new_mixers",
    "measure_overlap",
)
WRONG = {
    "ask": ("localhost:8000 question", "error: url: expected such as http://127.0.0.1:8000, found"),
    "compare": ("http://127.0.0.1:8000", "error: expected NAME=URL, such as ours=http://"),
}


@pytest.mark.parametrize("name", NEED_GPU)
def test_missing_gpu_is_one_line(name, monkeypatch, capsys):
    """In this process, which has imported torch: a process for each takes 3 s of CPU time."""
    monkeypatch.syspath_prepend("examples")
    monkeypatch.setattr(sys, "argv", [f"examples/{name}.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as raised:
        runpy.run_path(sys.argv[0], run_name="__main__")
    assert re.fullmatch(r"--device cuda: torch finds no CUDA GPU \(.*\)", raised.value.code)
    assert not any(capsys.readouterr())


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_is_one_line(name):
    arguments, words = WRONG[name]
    command = [sys.executable, f"examples/{name}.py", *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stderr.splitlines() if not line.startswith(("usage", " "))]
    assert done.returncode and len(lines) == 1 and words in lines[0], done.stderr


def test_quickstart_checks_its_argument_before_it_installs(tmp_path):
    (tmp_path / "examples").mkdir()
    (tmp_path / "tests").mkdir()
    shutil.copy("examples/quickstart.sh", tmp_path / "examples")
    (tmp_path / "tests" / "environment.sh").write_text("touch installed\n")
    command = ["bash", tmp_path / "examples" / "quickstart.sh", "smolm2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "expected docs-5m or smollm2, found smolm2\n")
    assert not (tmp_path / "installed").exists()


def numbers(found: object) -> list[float]:
    """Return all values of a result, at any depth."""
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, list):
        return [number for each in found for number in numbers(each)]
    return [found] if isinstance(found, int | float) else []


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", COMMANDS)
def test_measurement_script_runs(name, tmp_path):
    result = tmp_path / "result.json"
    flags = COMMANDS[name].replace("FOLDER", str(tmp_path)).split()
    command = [sys.executable, f"examples/{name}.py", "--json", str(result), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "failed" not in done.stderr, done.stderr[-2000:]
    found = numbers(json.loads(result.read_text()))
    assert len(found) > 1 and any(found), found


@pytest.mark.exhaustive
def test_grpo_example_trains_served_weights(tmp_path):
    pytest.importorskip("trl")
    command = [sys.executable, "examples/train_grpo.py", "--steps", "1", "--max-tokens", "8"]
    command += ["--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "largest mismatch with the rollout: trainer 0.0, engine 0.0" in done.stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["wait", "refuse"])
def test_server_cycles_lose_no_request_and_report_kill(policy):
    command = [sys.executable, "examples/server_cycles", "--paused-requests", policy]
    command += ["--cycles", "8", "--kills", "1", "--clients", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "The engine has died; it is restarting" in done.stdout
    assert (" refused" in done.stdout) == (policy == "refuse")


@pytest.mark.exhaustive
def test_request_files_lead_from_http_to_kernel():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "examples/request_files.py", "examples/models/docs-5m"]
    done = subprocess.run([*command, "--port", port], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    names = [line.split()[1] for line in done.stdout.splitlines()]
    assert names[0] == "qserve/server/http/http_protocol.py"
    assert names[-1] == "qkernels/rowwise/ops.py"
    order = ["qserve/engine/engine.py", "qserve/engine/runner/worker.py", "qserve/model/decoder.py"]
    assert [name for name in names if name in order] == order
