"""What decides the bytes of a run's layers: two runs with the same identity may share layers."""

import hashlib
from collections.abc import Mapping
from typing import Any

from calibrate.data import CalibrationData
from calibrate.float_model import FloatModel
from calibrate.recipe import Recipe
from calibrate.report import tool_versions
from formats.scheme import Scheme


def identity(
    model: FloatModel,
    schemes: Mapping[str, Scheme],
    recipe: Recipe,
    data: CalibrationData | None,
    seed: int,
    device: str,
) -> dict[str, Any]:
    """Model, settings, data and versions, each by the name that an error about it uses.

    The model counts by its config, headers, file sizes and times, not by its bytes: hashing an
    8B model would take longer than rounding it.
    """
    return {
        "model": model_digest(model),
        "modified": {
            path.name: path.stat().st_mtime_ns
            for path in sorted({entry.file for entry in model.entries.values()})
        },
        "schemes": {name: str(scheme) for name, scheme in schemes.items()},
        "recipe": recipe.name,
        "calibration": data
        and {
            "source": data.source,
            "sha256": data.sha256,
            "windows": data.ids_WS.shape[0],
            "sequence_length": data.ids_WS.shape[1],
            "seed": data.seed,
        },
        "seed": seed,
        "device": device,
        "versions": tool_versions(),
    }


def model_digest(model: FloatModel) -> str:
    """SHA-256 of config.json and the safetensors headers."""
    digest = hashlib.sha256(repr(sorted(model.config.items(), key=str)).encode())
    for path in sorted({entry.file for entry in model.entries.values()}):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
    for entry in model.entries.values():
        digest.update(f"{entry.name} {entry.dtype} {entry.shape}".encode())
    return digest.hexdigest()
