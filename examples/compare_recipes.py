"""Table of recipes on one float model: perplexity, KL divergence, share of equal top tokens.

    python examples/compare_recipes.py MODEL --texts wiki.txt heldout.jsonl --calibration C.jsonl

Each recipe is one `qserve quantize`, each text one `qserve eval --against MODEL`; the commands are
printed. The folders go into --work, and are made again.
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from calibrate.recipe import RECIPES
from formats.table import text_table

HEADER = ("recipe", "text", "perplexity", "float", "KL divergence", "same top token")


def run(*words: str) -> str:
    """Run a `qserve` command; returns what it prints."""
    print("$", shlex.join(["qserve", *words]), flush=True)
    command = [sys.executable, "-m", "qserve.cli", *words]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def measure(folder: Path, text: str, arguments: argparse.Namespace) -> dict[str, Any]:
    windows = ("--windows", str(arguments.windows), "--sequence-length", str(arguments.length))
    return json.loads(
        run(
            *("eval", str(folder), "--against", arguments.model, "--text", text, *windows),
            *("--device", arguments.device, "--dtype", arguments.dtype, "--json"),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--texts", nargs="+", required=True)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--scheme", default="w4a16-sym")
    parser.add_argument("--group-size", default="64")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=8, help="of each text")
    parser.add_argument("--length", type=int, default=1024, help="of such a window")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", help="in which models are compared")
    parser.add_argument("--work", help="folder for the models; default: a temporary one")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for recipe in arguments.recipes:
            folder = Path(arguments.work or temporary) / recipe
            shutil.rmtree(folder, ignore_errors=True)
            run(
                *("quantize", arguments.model, "-o", str(folder), "--recipe", recipe),
                *("--scheme", arguments.scheme, "--group-size", arguments.group_size),
                *("--calibration", arguments.calibration, "--samples", str(arguments.samples)),
                *("--sequence-length", str(arguments.sequence_length)),
                *("--device", arguments.device, "--quality-windows", "0"),
            )
            for text in arguments.texts:
                found = measure(folder, text, arguments)
                rows.append(
                    (
                        recipe,
                        Path(text).name,
                        f"{found['perplexity']:.2f}",
                        f"{found['reference_perplexity']:.2f}",
                        f"{found['divergence']:.4f}",
                        f"{100 * found['same_top_token']:.1f} %",
                    )
                )
    print(text_table(HEADER, rows))


if __name__ == "__main__":
    main()
