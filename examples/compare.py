"""Compare servers under the same load from the same client, in one table.

    python examples/compare.py qserve=http://127.0.0.1:8000 vllm=http://127.0.0.1:8001 \\
        -- --request-rate 8 --num-prompts 400 --random-input-len 1024 --random-output-len 128

Arguments after -- are passed to `qserve bench serve`. The servers take turns, --runs times, so that
a slow minute of the machine affects all of them. The table shows the median of the runs.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROWS = {
    "request_throughput": "requests/s",
    "output_throughput": "output tokens/s",
    "median_ttft_ms": "TTFT median, ms",
    "p99_ttft_ms": "TTFT p99, ms",
    "median_tpot_ms": "TPOT median, ms",
    "p99_tpot_ms": "TPOT p99, ms",
    "p99_itl_ms": "ITL p99, ms",
    "request_goodput": "requests/s within the limits",
    "failed": "failed requests",
}


def measure(url: str, flags: list[str], folder: Path) -> dict:
    """Run the client once and return its results."""
    path = folder / "run.json"
    command = [sys.executable, "-m", "qserve", "bench", "serve", "--base-url", url, *flags]
    command += ["--save-result", "--result-dir", str(folder), "--result-filename", path.name]
    path.unlink(missing_ok=True)
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if not path.is_file():
        sys.exit(f"{url}: the client ended with exit code {done.returncode}")
    return json.loads(path.read_text())


def table(results: dict[str, list[dict]]) -> str:
    """Markdown table; the last column is the first server's figure over the second's."""
    names = list(results)
    ratio = [f"{names[0]} / {names[1]}"] if len(names) > 1 else []
    lines = [f"| | {' | '.join(names + ratio)} |", f"|---{'|---' * len(names + ratio)}|"]
    for key, title in ROWS.items():
        values = [
            [run[key] for run in runs if run.get(key) is not None] for runs in results.values()
        ]
        if not all(values):
            continue
        medians = [statistics.median(each) for each in values]
        cells = [f"{each:,.2f}" for each in medians]
        if ratio:
            cells.append(f"{medians[0] / medians[1]:.2f}" if medians[1] else "-")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("server", nargs="+", help="NAME=URL")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", help="file for all results")
    own, flags = sys.argv[1:], []
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    arguments = parser.parse_args(own)
    if bare := [each for each in arguments.server if "=" not in each]:
        parser.error(f"expected NAME=URL, such as ours=http://127.0.0.1:8000, found {bare[0]!r}")
    servers = dict(each.split("=", 1) for each in arguments.server)
    results: dict[str, list[dict]] = {name: [] for name in servers}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.runs):
            for name, url in servers.items():
                results[name].append(measure(url, flags, Path(folder)))
    print(table(results))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
