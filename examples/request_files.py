"""List this project's files that a chat request runs through, up to the first kernel of its step.

    python examples/request_files.py MODEL

Starts a server with a profile hook in each of its processes, sends one request to warm up, and
prints the files of the second request. Read them in this order to follow a request.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from ask import stream_answer

ROOT = Path(__file__).resolve().parent.parent
KERNELS = "qkernels/"
# sitecustomize.py of the server's processes: notes each file once, while the file `on` is there
HOOK = """
import os, sys, threading, time
root, folder, seen = {root!r} + "/", {folder!r}, set()
def note(frame, event, argument):
    path = frame.f_code.co_filename
    if event != "call" or path in seen or not path.startswith(root):
        return
    if "/site-packages/" not in path:  # of a virtual environment in the project's folder
        if os.path.exists(folder + "/on"):
            seen.add(path)
            with open(f"{{folder}}/{{os.getpid()}}.log", "a") as file:
                file.write(f"{{time.time():.6f}} {{path[len(root):]}}\\n")
threading.setprofile(note)
sys.setprofile(note)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="List the files that a chat request enters.")
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8377)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(HOOK.format(root=str(ROOT), folder=folder))
        path = os.pathsep.join([folder, str(ROOT), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "qserve.cli", "serve", arguments.model]
        command += ["--port", str(arguments.port), "--max-model-len", "256", "--enforce-eager"]
        server = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL
        )
        try:
            _wait(f"http://127.0.0.1:{arguments.port}", server)
            files = _files(f"http://127.0.0.1:{arguments.port}", Path(folder))
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()
    for number, name in enumerate(files, start=1):
        lines = len((ROOT / name).read_text().splitlines())
        print(f"{number:4} {name} ({lines} lines)")
    return 0


def _files(url: str, folder: Path) -> list[str]:
    """Return the files of the second request, up to the first tensor operation of qkernels."""
    _ask(url)
    time.sleep(1)
    started = time.time()
    (folder / "on").touch()
    _ask(url)
    rows = [line.split() for log in folder.glob("*.log") for line in log.read_text().splitlines()]
    names = [name for when, name in sorted(rows) if float(when) >= started]
    names = list(dict.fromkeys(names))
    first = next(n for n, name in enumerate(names) if name.startswith(KERNELS + "rowwise"))
    return names[: first + 1]


def _ask(url: str) -> None:
    for _ in stream_answer(url, "Hi", 4, 0.0, None):
        pass


def _wait(url: str, server: subprocess.Popen) -> None:
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/ready").close()
            return
        except OSError:
            time.sleep(0.5)
    raise SystemExit("the server did not start; its log is above")


if __name__ == "__main__":
    sys.exit(main())
