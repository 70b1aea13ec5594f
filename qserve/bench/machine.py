"""Description of a measurement's environment, which each result contains; writing of results."""

import dataclasses
import json
import platform
from pathlib import Path
from typing import Any

import torch

import qserve
from qserve.config import EngineConfig


def machine() -> dict[str, Any]:
    """Return the device and the versions that affect the speed."""
    found = {"device": platform.processor() or platform.machine(), "torch": torch.__version__}
    found |= {"python": platform.python_version(), "qserve": qserve.__version__}
    if torch.cuda.is_available():
        import triton

        found |= {
            "device": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
        }
    return found


def engine_settings(config: EngineConfig) -> dict[str, Any]:
    """Return the engine's settings as JSON values."""
    return dataclasses.asdict(config)


def write_json(path: str | None, result: object) -> None:
    """Write a result to a file, and create missing folders. Do nothing if `path` is None."""
    if path is None:
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(result, indent=4) + "\n", encoding="utf-8")
