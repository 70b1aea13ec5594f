"""Measure a start phase by phase, from the start of the process to the first token.

    python examples/measure_start.py                          # an 8B's shape, random weights
    python examples/measure_start.py --model FOLDER           # a real checkpoint
    python examples/measure_start.py --against CLONE          # and another version, in turn

Starts `qserve serve`; the offline engine with --offline, or if the server's packages are missing.
The first start has an empty folder for compiled kernels; later starts use the folder that it
filled. Prints each log line after its time and the seconds since the line before, and the CPU time
and memory of each process at the first token.
"""

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

TOKENIZER = Path(__file__).parent / "models" / "docs-5m"
ROOT = Path(__file__).resolve().parent.parent
READY = "Serving "  # the server's line, and the offline engine's here
FIRST_TOKEN = "First token"

OFFLINE = """
import json, logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
print("Python is up", flush=True)
from qserve.llm import LLM, SamplingParams
print("Imports are done", flush=True)
llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
print("Serving offline", flush=True)
params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
llm.generate([[5] * 128], params, use_tqdm=False)
print("First token", flush=True)
"""


def write_model(folder: Path, shape: str, scheme: str | None) -> str:
    """Write a model folder with config and tokenizer for --load-format dummy; return its path."""
    from bench_shapes import write_config  # loads formats

    folder.mkdir()
    write_config(folder, shape, scheme)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)
    return str(folder)


def server_command(folder: str, settings: dict) -> list[str]:
    flags = []
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        flags += [flag] if value is True else [flag, str(value)]
    return [sys.executable, "-u", "-m", "qserve", "serve", folder, "--port", "0", *flags]


def processes(pid: int) -> list[dict]:
    """Return CPU seconds and resident MiB of a process and of its children, on Linux."""
    found = []
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (OSError, IndexError):
        return []
    module = words[words.index("-m") + 1] if "-m" in words else words[0]
    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    mib = resident * os.sysconf("SC_PAGESIZE") / 2**20
    found.append({"process": module, "cpu_s": round(seconds, 2), "mib": round(mib)})
    return found + [each for child in children for each in processes(int(child))]


def run(command: list[str], cache: Path, limit: float, tree: Path = ROOT) -> dict:
    """Start the process, print its lines with their times, request one token, end it.

    `tree`: the clone whose packages it imports.
    """
    path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
    started = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ
        | {"TRITON_CACHE_DIR": str(cache), "PYTHONUNBUFFERED": "1", "PYTHONPATH": path},
    )
    lines, last, found = [], 0.0, {}
    try:
        for raw in process.stdout:
            now = time.perf_counter() - started
            # A progress bar overwrites itself: keep its last state.
            text = raw.decode(errors="replace").rstrip("\n").split("\r")[-1].strip()
            if not text:
                continue
            print(f"{now:8.2f} {now - last:+7.2f}  {text}", flush=True)
            lines.append((round(now, 2), text))
            last = now
            if text.startswith(READY):
                found["ready_s"] = now
                if "http://" in text:
                    ask(text.rsplit(" ", 1)[-1])
                    found["first_token_s"] = time.perf_counter() - started
                    break
            elif text.startswith(FIRST_TOKEN):
                found["first_token_s"] = now
                break
            if now > limit:
                break
        if "first_token_s" in found:
            found["processes"] = processes(process.pid)
            for each in found["processes"]:
                print(f"{each['cpu_s']:8.2f} s of CPU {each['mib']:6d} MiB  {each['process']}")
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return found | {"lines": lines}


def ask(address: str) -> None:
    body = {"prompt": [5] * 128, "max_tokens": 1, "ignore_eos": True}
    request = urllib.request.Request(
        f"{address}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a model folder; default: random weights of --shape")
    parser.add_argument("--shape", default="llama-3-8b", help="one of bench_generate.py's")
    parser.add_argument("--scheme", default="w4a16-sym", help="or w8a8, or bf16")
    parser.add_argument("--engine", default="{}", help="further settings of the engine, as JSON")
    parser.add_argument(
        "--offline", action="store_true", help="start the offline engine, not the server"
    )
    parser.add_argument(
        "--warm", type=int, default=2, help="number of starts with a full kernel cache"
    )
    parser.add_argument("--against", type=Path, help="another clone, started in turn with this one")
    parser.add_argument("--limit", type=float, default=300, help="time limit of one start, seconds")
    parser.add_argument("--json", help="file to write the results to")
    arguments = parser.parse_args()
    settings = json.loads(arguments.engine)
    offline = arguments.offline or importlib.util.find_spec("starlette") is None
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.model
        if folder is None:
            scheme = None if arguments.scheme == "bf16" else arguments.scheme
            folder = write_model(Path(scratch) / "model", arguments.shape, scheme)
            settings = {"load_format": "dummy"} | settings
        command = server_command(folder, settings)
        if offline:
            command = [sys.executable, "-u", "-c", OFFLINE, folder, json.dumps(settings)]
        trees = {"": ROOT} if arguments.against is None else {"": ROOT, "other": arguments.against}
        for start in ("cold", *(f"warm {i + 1}" for i in range(arguments.warm))):
            for other, tree in trees.items():
                name = f"{other} {start}".strip()
                print(f"--- {name}: {'offline engine' if offline else 'server'}")
                cache = Path(scratch) / f"{other}kernels"
                results[name] = run(command, cache, arguments.limit, tree.resolve())
    for name, found in results.items():
        times = [
            f"{what} {found[what]:.1f}" for what in ("ready_s", "first_token_s") if what in found
        ]
        print(f"{name}: {', '.join(times) or 'did not come up'}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
