"""quality.json: the measured distance from the float model, and how it was measured."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calibrate.results.report import QuantizationReport, public_name
from formats.quality.probe import Probe
from formats.quality.record import VERSION

PATHS = ("calibration", "eval_text", "adapter", "against")  # settings that may be local paths


def quality_record(
    report: QuantizationReport,
    probe: Probe | None,
    checksums: Mapping[str, int],
    settings: Mapping[str, Any] | None,
    target: str | Path,
) -> dict[str, Any]:
    """Return the contents of quality.json.

    `settings`: settings of the command line, or None for a call from Python.
    """
    return {
        "version": VERSION,
        "measured": report.quality,
        "command": None if settings is None else command_line(report.source, target, settings),
        "evaluate": None
        if report.quality is None
        else f"qserve eval {Path(target).name} --against {report.source} --text TEXT",
        "source": report.source,
        "source_sha256": report.source_sha256,
        "scheme": report.scheme,
        "recipe": report.recipe,
        "format": report.format,
        "bits_per_weight": report.bits_per_weight,
        "calibration": report.calibration,
        "seed": report.seed,
        "rounded_to_nearest": {
            linear.name: note
            for linear in report.linears
            for note in linear.notes
            if note.startswith("rounded to nearest")
        },
        "versions": report.versions,
        "loads_in": {program: list(each) for program, each in report.loads_in.items()},
        "probe": None if probe is None else probe.to_dict(),
        "checksums": dict(checksums),
    }


def command_line(
    source: str, target: str | Path, settings: Mapping[str, Any], command: str = "quantize"
) -> str:
    """Return the `qserve` command line for these settings, with names instead of local paths."""
    words = ["qserve", command, source, "-o", Path(target).name]
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if name == "bos":
            words += [] if value else ["--no-bos"]
        elif value is True:
            words.append(flag)
        elif isinstance(value, list):
            words += [word for each in value for word in (flag, str(each))]
        elif value is not None and value is not False:
            words += [flag, public_name(value) if name in PATHS else str(value)]
    return shlex.join(words)
