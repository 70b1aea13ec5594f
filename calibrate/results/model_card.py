"""Model card (README.md) of a quantized folder: contents, origin, and how to load it.

The settings are written next to it as YAML. `qserve quantize MODEL -o FOLDER --config
quantization_recipe.yaml` reproduces the folder.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from calibrate.results.report import QuantizationReport
from formats.compatibility.loads_in import Verdict
from formats.files.side_files import CHANNEL_FACTORS
from formats.quality.record import measured_text
from formats.table import count_text, size_text

CARD, RECIPE_FILE = "README.md", "quantization_recipe.yaml"
# Command that loads the folder in each program
COMMANDS = {
    "this project": "qserve serve {name}",
    "vLLM": "vllm serve {name}",
    "SGLang": "python -m sglang.launch_server --model-path {name}",
    "transformers": 'AutoModelForCausalLM.from_pretrained("{name}")',
}


def model_card(
    report: QuantizationReport,
    verdicts: Sequence[Verdict],
    name: str,
    *,
    has_factors: bool = False,
) -> str:
    """Return the model card of the folder `name`. `has_factors`: it has channel factors."""
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
        windows = f"{count_text(data['windows'], 'window')} of {data['sequence_length']} tokens"
        facts.append(("calibration", f"{data['source']}, {windows}, seed {data['seed']}"))
    if report.kv_cache:
        facts.append(("KV cache", f"scales for {report.kv_cache}"))
    if report.quality:
        facts.append(("quality", measured_text(report.quality)))
        facts.append(("SHA-256 of the evaluated token ids", report.quality["sha256"]))
    if report.left_in_float:
        facts.append(("left in float", count_text(len(report.left_in_float), "linear")))
    facts.append(("made by", report.versions["quantizer"]))
    lines = [f"# {name}", "", f"A {report.scheme} model in the {report.format} format.", ""]
    lines += ["| | |", "|---|---|", *(f"| {key} | {_cell(value)} |" for key, value in facts)]
    lines += ["", "## How to load it", "", "| program | | how |", "|---|---|---|"]
    for verdict in verdicts:
        how = f"`{COMMANDS[verdict.program].format(name=name)}`"
        if verdict.answer == "no":
            how = ""
        why = f"({verdict.reason})" if how and verdict.reason else verdict.reason
        reason = f"{how} {why}".strip()
        lines.append(f"| {verdict.program} | {verdict.answer} | {_cell(reason)} |")
    if has_factors:
        lines += [
            "",
            "LoRA adapters of the float model fit in this project, which reads"
            f" `{CHANNEL_FACTORS}`. Other programs do not read it: there, use adapters that were"
            " trained on this folder.",
        ]
    if report.warnings:
        lines += ["", *(f"- {warning}" for warning in report.warnings)]
    lines += [
        "",
        f"`{RECIPE_FILE}` contains the settings of the run, `quantization_report.json` the errors"
        " of each linear, `quantization_report.html` the plots, and `quality.json` the quality, the"
        " command and what a server compares when it starts.",
    ]
    return "\n".join(lines) + "\n"


def recipe_text(settings: Mapping[str, Any]) -> str:
    """Format the settings as YAML."""
    import yaml

    return yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
