"""Compare recipes and other quantization tools on one float model, in tables.

    python examples/compare_recipes.py MODEL --texts wiki.txt heldout.jsonl --calibration C.jsonl

Without `--calibration`, recipes and tools are calibrated on the default texts.

The tables have perplexity, KL divergence and the rate of equal top tokens. Each recipe is one
`qserve quantize` command, which is printed. `--schemes` adds other schemes with their default
recipes. `--distill` adds recipes after `qserve distill` has trained their scales and codes.

The figures for each text are those of `qserve eval --against MODEL`; the float model runs once.
Other tools get the same windows of token ids. A tool runs in this interpreter if it is installed
here, or in another environment with `--tool llm-compressor=PYTHON`. If a tool fails, it is named
and the table continues. With several --calibration, each recipe is calibrated on each of them.
`--check` fails if a recipe is worse than rtn.
"""

import argparse
import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from calibrate.float_model import FloatModel
from calibrate.quality.agreement import AgreementSum
from calibrate.recipe import RECIPES
from calibrate.texts.data import read_for_model
from calibrate.texts.documents import read_texts
from calibrate.texts.evaluate import make_windows, text_opening
from formats.errors import InputError
from formats.scheme import Scheme
from formats.table import text_table
from qserve.llm import LLM
from qserve.text.tokenizer import Tokenizer

HEADER = ("recipe", "calibration", "text", "perplexity", "float", "KL divergence", "same top token")
# Tools of other_quantizers.py -> the module that each needs
TOOLS = {"llm-compressor": "llmcompressor", "gptqmodel": "gptqmodel", "auto-round": "auto_round"}
NEAREST = "rtn"
BLOCK_SIZE = 16  # tokens of a page of the KV cache
CODE_RATE = "0.01"  # of `distill`
NO_DATA = "-"  # as a calibration set: the recipe reads none
DEFAULT_TEXTS = "default texts"  # as a calibration set: the texts of the package


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One quantized model on one text."""

    recipe: str
    calibration: str
    text: str
    measured: dict[str, Any]  # as `qserve eval --json` prints it

    def cells(self) -> tuple[str, ...]:
        found = self.measured
        return (
            *(self.recipe, self.calibration, self.text),
            *(f"{found['perplexity']:.2f}", f"{found['reference_perplexity']:.2f}"),
            *(f"{found['divergence']:.4f}", f"{100 * found['same_top_token']:.1f} %"),
        )


def run(command: Sequence[str], shown: str = "") -> str:
    """Print and run a command; return its output."""
    print("$", shown or shlex.join(command), flush=True)
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def qserve(*words: str) -> str:
    command = [sys.executable, "-m", "qserve.cli", *words]
    return run(command, shlex.join(["qserve", *words]))


def calibration_flag(calibration: str) -> list[str]:
    return [] if calibration in (NO_DATA, DEFAULT_TEXTS) else ["--calibration", calibration]


def quantize(
    folder: Path,
    recipe: str | None,
    calibration: str,
    arguments: argparse.Namespace,
    scheme: str = "",
) -> None:
    """Quantize with a recipe of this project; None: the default recipe of the scheme."""
    scheme = scheme or arguments.scheme
    weight = Scheme.parse(scheme).weight
    has_groups = weight.type == "int" and weight.group_size > 0
    qserve(
        *("quantize", arguments.model, "-o", str(folder), "--scheme", scheme),
        *([] if recipe is None else ["--recipe", recipe]),
        *(["--group-size", arguments.group_size] if has_groups else []),
        *calibration_flag(calibration),
        *("--samples", str(arguments.samples)),
        *("--sequence-length", str(arguments.sequence_length)),
        *("--device", arguments.device, "--quality-windows", "0"),
    )


def distill(source: Path, folder: Path, calibration: str, arguments: argparse.Namespace) -> None:
    """Train scales and codes of a folder on the calibration data."""
    qserve(
        *("distill", str(source), "--against", arguments.model, "-o", str(folder)),
        *calibration_flag(calibration),
        *("--samples", str(arguments.samples)),
        *("--sequence-length", str(arguments.sequence_length)),
        *("--code-rate", CODE_RATE, "--steps", str(arguments.steps)),
        *("--device", arguments.device, "--quality-windows", "0"),
    )


def quantize_by(
    python: str, tool: str, folder: Path, windows: Path, arguments: argparse.Namespace
) -> None:
    """Quantize with another tool on the same windows. `python`: an interpreter with the tool."""
    spec = Scheme.parse(arguments.scheme, int(arguments.group_size)).weight
    iterations = arguments.iterations
    run(
        [
            *(python, str(Path(__file__).with_name("other_quantizers.py")), tool),
            *(arguments.model, str(folder), "--windows", str(windows)),
            *("--bits", str(spec.bits), "--group-size", str(spec.group_size)),
            *("--device", arguments.device),
            *([] if iterations is None else ["--iterations", str(iterations)]),
        ]
    )


class Reference:
    """The float model's logits on the windows of each text, to compare other models with."""

    def __init__(
        self,
        model: str | Path,
        texts: Sequence[str],
        *,
        windows: int,
        length: int,
        device: str = "cpu",
        dtype: str = "float32",
    ) -> None:
        """Run the float model on `windows` windows of `length` tokens of each text."""
        self.length, self.device, self.dtype = length, device, dtype
        tokenizer = Tokenizer(str(model))
        self.opening = text_opening(tokenizer)
        reference = self._load(model)
        self.logits = {}
        for text in texts:
            windows_WS = make_windows(
                read_texts(text),
                lambda each: tokenizer.encode(each, add_special_tokens=False),
                tokenizer.bos_token_id,
                length,
                windows,
                opening=self.opening,
                source=text,
            )
            self.logits[text] = [(ids_S, reference.logits(ids_S.tolist())) for ids_S in windows_WS]

    def _load(self, folder: str | Path) -> LLM:
        return LLM(
            str(folder),
            device=self.device,
            dtype=self.dtype,
            max_model_len=self.length,
            max_num_seqs=1,
            num_gpu_blocks_override=-(-self.length // BLOCK_SIZE) + 1,
            block_size=BLOCK_SIZE,
            enforce_eager=True,
        )

    def measure(self, folder: str | Path) -> dict[str, dict[str, Any]]:
        """Return the figures of `qserve eval --against`, by text."""
        model, found = self._load(folder), {}
        for text, windows in self.logits.items():
            total = AgreementSum()
            for ids_S, logits_SV in windows:
                total.add(ids_S, logits_SV, model.logits(ids_S.tolist()), self.opening)
            found[text] = asdict(total.result())
        return found


def write_windows(
    file: Path, model: str | Path, calibration: str, samples: int, sequence_length: int
) -> Path:
    """Write the windows of token ids that `qserve quantize` calibrates on."""
    source = None if calibration == DEFAULT_TEXTS else calibration
    data = read_for_model(FloatModel(model), source, samples, sequence_length, 0, True)
    file.write_text(json.dumps(data.ids_WS.tolist()))
    return file


def tools_of(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the tools that are installed, with the interpreter that has them."""
    found = {
        name: sys.executable
        for name, module in TOOLS.items()
        if importlib.util.find_spec(module) is not None
    }
    found |= dict(each.split("=", 1) for each in arguments.tool)
    unknown = sorted(found.keys() - TOOLS.keys())
    if unknown:
        raise SystemExit(f"--tool {unknown[0]}: expected one of {', '.join(TOOLS)}")
    return {} if arguments.no_tools else found


def above_nearest(rows: Sequence[Row]) -> list[str]:
    """Return a line for each recipe of this project that is worse than rtn on some text."""
    limits = {row.text: row.measured for row in rows if row.recipe == NEAREST}
    return [
        f"{row.recipe} on {row.text}, calibrated on {row.calibration}:"
        f" {name} {found:.4f}, rtn {most:.4f}"
        for row in rows
        if row.recipe in RECIPES and row.text in limits
        for name in ("perplexity", "divergence")
        if (found := row.measured[name]) > (most := limits[row.text][name])
    ]


def spread(rows: Sequence[Row]) -> str:
    """Return a table of the smallest and largest KL divergence over the calibration sets."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        found.setdefault((row.recipe, row.text), []).append(row.measured["divergence"])
    cells = [
        (*key, f"{min(values):.4f}", f"{max(values):.4f}", f"{max(values) / min(values):.2f}")
        for key, values in found.items()
        if len(values) > 1
    ]
    return text_table(("recipe", "text", "least KL", "largest KL", "ratio"), cells) if cells else ""


def as_json(rows: Sequence[Row]) -> str:
    values = [
        {**row.measured, "recipe": row.recipe, "calibration": row.calibration, "text": row.text}
        for row in rows
    ]
    return json.dumps(values, indent=1) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--texts", nargs="+", required=True)
    parser.add_argument(
        "--calibration", nargs="+", default=[DEFAULT_TEXTS], help="default: texts of the package"
    )
    parser.add_argument("--recipes", nargs="*", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--schemes", nargs="*", default=[], help="with their default recipes")
    parser.add_argument(
        "--distill", nargs="*", choices=RECIPES, default=[], help="recipes to train codes of"
    )
    parser.add_argument("--steps", type=int, default=300, help="of --distill")
    parser.add_argument("--tool", action="append", default=[], help="NAME=PYTHON of a tool")
    parser.add_argument("--no-tools", action="store_true", help="only this project's recipes")
    parser.add_argument("--iterations", type=int, help="of AutoRound the tool; default: its own")
    parser.add_argument("--scheme", default="w4a16-sym")
    parser.add_argument("--group-size", default="64")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=8, help="of each text")
    parser.add_argument("--length", type=int, default=1024, help="of such a window")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", help="in which models are compared")
    parser.add_argument("--work", help="folder for the models; default: a temporary one")
    parser.add_argument("--json", help="file for the rows")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if a recipe is worse than rtn on a text"
    )
    arguments = parser.parse_args()
    rows: list[Row] = []
    failed: list[str] = []
    reference = Reference(
        arguments.model,
        arguments.texts,
        windows=arguments.windows,
        length=arguments.length,
        device=arguments.device,
        dtype=arguments.dtype,
    )
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(arguments.work or temporary)
        work.mkdir(parents=True, exist_ok=True)

        def add(name: str, calibration: str, folder: Path) -> None:
            own = NO_DATA if calibration == NO_DATA else Path(calibration).name
            for text, found in reference.measure(folder).items():
                rows.append(Row(recipe=name, calibration=own, text=Path(text).name, measured=found))
                print(" | ".join(rows[-1].cells()), flush=True)
            if arguments.json:
                Path(arguments.json).write_text(as_json(rows))
            if not arguments.work:
                shutil.rmtree(folder)

        def empty(name: str) -> Path:
            shutil.rmtree(work / name, ignore_errors=True)
            return work / name

        for recipe in arguments.recipes:
            sets = arguments.calibration if RECIPES[recipe].needs_data else [NO_DATA]
            for number, calibration in enumerate(sets):
                folder = empty(f"{recipe}-{number}")
                quantize(folder, recipe, calibration, arguments)
                add(recipe, calibration, folder)
        for scheme in arguments.schemes:
            for number, calibration in enumerate(arguments.calibration):
                folder = empty(f"{scheme}-{number}")
                quantize(folder, None, calibration, arguments, scheme)
                add(scheme, calibration, folder)
        for recipe in arguments.distill:
            for number, calibration in enumerate(arguments.calibration):
                source, folder = (
                    empty(f"{recipe}-source-{number}"),
                    empty(f"{recipe}-codes-{number}"),
                )
                quantize(source, recipe, calibration, arguments)
                distill(source, folder, calibration, arguments)
                if not arguments.work:
                    shutil.rmtree(source)
                add(f"{recipe}, distilled", calibration, folder)
        for tool, python in tools_of(arguments).items():
            for number, calibration in enumerate(arguments.calibration):
                file = write_windows(
                    work / f"windows-{number}.json",
                    arguments.model,
                    calibration,
                    arguments.samples,
                    arguments.sequence_length,
                )
                folder = empty(f"{tool}-{number}")
                try:
                    quantize_by(python, tool, folder, file, arguments)
                    add(tool, calibration, folder)
                except (subprocess.CalledProcessError, InputError) as error:
                    failed.append(f"{tool}, calibrated on {calibration}: {error}")
                    print(failed[-1], flush=True)
    print(text_table(HEADER, [row.cells() for row in rows]))
    print(spread(rows))
    worse = above_nearest(rows)
    print("\n".join(f"above rtn: {line}" for line in worse))
    print("\n".join(f"failed: {line}" for line in failed))
    return 1 if worse and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
