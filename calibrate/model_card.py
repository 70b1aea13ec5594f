"""The README.md of a quantized folder: what it is, how it was made, how to load it. Knows no maths.

Beside it stands the recipe, a YAML file of the settings: `qserve quantize MODEL -o FOLDER --config
quantization_recipe.yaml` makes the folder again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from calibrate.report import QuantizationReport
from formats.loads_in import Verdict
from formats.table import size_text

CARD, RECIPE_FILE = "README.md", "quantization_recipe.yaml"
# how each program is told to load the folder
COMMANDS = {
    "this project": "qserve serve {name}",
    "vLLM": "vllm serve {name}",
    "SGLang": "python -m sglang.launch_server --model-path {name}",
    "transformers": 'AutoModelForCausalLM.from_pretrained("{name}")',
}


def model_card(report: QuantizationReport, verdicts: Sequence[Verdict], name: str) -> str:
    """The page of a folder called `name`."""
    data = report.calibration or {}
    facts = [
        ("made from", report.source),
        ("scheme", report.scheme),
        ("bits per quantized weight", f"{report.bits_per_weight:.2f}"),
        ("recipe", report.recipe),
        ("format", report.format),
        ("size", f"{size_text(report.bytes_before)} -> {size_text(report.bytes_after)}"),
    ]
    if data:
        windows = f"{data['windows']} windows of {data['sequence_length']} tokens"
        facts.append(("calibration", f"{data['source']}, {windows}, seed {data['seed']}"))
    if report.kv_cache:
        facts.append(("KV cache", f"scales for {report.kv_cache}"))
    if report.perplexity:
        found = report.perplexity
        facts.append(
            (
                "perplexity",
                f"{found['before']:.3f} before, {found['after']:.3f} after, on {found['windows']}"
                f" windows of {found['sequence_length']} tokens of {found['text']}",
            )
        )
    if report.left_in_float:
        facts.append(("left in float", f"{len(report.left_in_float)} linears"))
    facts.append(("made by", report.versions["quantizer"]))
    lines = [f"# {name}", "", f"A {report.scheme} model in the {report.format} format.", ""]
    lines += ["| | |", "|---|---|", *(f"| {key} | {_cell(value)} |" for key, value in facts)]
    lines += ["", "## How to load it", "", "| program | | how |", "|---|---|---|"]
    for verdict in verdicts:
        how = f"`{COMMANDS[verdict.program].format(name=name)}`"
        if verdict.answer == "no":
            how = ""
        reason = f"{how} {verdict.reason}".strip()
        lines.append(f"| {verdict.program} | {verdict.answer} | {_cell(reason)} |")
    if report.warnings:
        lines += ["", *(f"- {warning}" for warning in report.warnings)]
    lines += [
        "",
        f"`{RECIPE_FILE}` has the settings of the run, `quantization_report.json` each linear's"
        " error, `quantization_report.html` draws them.",
    ]
    return "\n".join(lines) + "\n"


def recipe_text(settings: Mapping[str, Any]) -> str:
    """The settings as YAML."""
    import yaml

    return yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
