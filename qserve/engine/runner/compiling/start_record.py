"""StartRecord: warm-up shapes of an earlier start, stored in the folder of compiled kernels.

To find the warm-up shapes, a start plans every number of rows of every product and records the
launches of each, which takes 1 to 2 s for an 8B model. The result depends only on the facts in a
digest. A start that finds a record with its digest, and all kernels compiled, skips this work. If a
fact is missing from the digest, the only effect is that a kernel is compiled at its first launch.
"""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import torch

from formats.files.atomic_file import write_atomic
from qkernels.gpu.device import sm_count
from qkernels.tuning.table import tuning_table_of
from qserve.config import EngineConfig
from qserve.engine.runner.model_runner import ModelRunner
from qserve.model.cache_spec import WarmUpShape
from qserve.model.layer_kinds import launch_kind, sample_of_layers

logger = logging.getLogger(__name__)

HOME = Path(__file__).resolve().parents[4]  # folder of this project's packages
PACKAGES = ("formats", "qkernels", "qserve")
# Settings that no kernel depends on, so that other models with the same layers share a record.
IGNORED = ("model", "tokenizer", "revision", "seed")


def start_key(runner: ModelRunner, max_model_len: int, toolchain: str) -> str:
    """Return the digest of everything that warm-up shapes and kernels depend on.

    `toolchain`: identifies the compiler, the GPU architecture and the sources of kernels.
    """
    decoder, _ = sample_of_layers(runner.decoder)
    settings = {name: value for name, value in _plain(runner.config).items() if name not in IGNORED}
    facts = (
        toolchain,
        torch.__version__,
        _sources(),
        settings,
        max_model_len,
        _device_facts(runner.device),
        [repr(spec) for spec in dict.fromkeys(runner.cache_specs)],
        launch_kind(decoder),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _plain(config: EngineConfig) -> dict[str, str]:
    return {each.name: repr(getattr(config, each.name)) for each in dataclasses.fields(config)}


def _device_facts(device: torch.device) -> tuple[str, int, str]:
    if device.type != "cuda":
        return device.type, 0, ""
    name = torch.cuda.get_device_name(device)
    return name, sm_count(device), repr(tuning_table_of(device))


def _sources() -> list[tuple[str, int, int]]:
    """Return name, size and modification time of this project's files, which launch kernels."""
    files = sorted(path for name in PACKAGES for path in (HOME / name).rglob("*.py"))
    found = [(path, path.stat()) for path in files]
    return [(str(path.relative_to(HOME)), stat.st_size, stat.st_mtime_ns) for path, stat in found]


class StartRecord:
    """The record of one digest: a file in the folder of compiled kernels."""

    def __init__(self, folder: Path, key: str) -> None:
        self._path = folder / f"qserve-start-{key}.json"

    def read(self, compiled: Collection[str]) -> list[WarmUpShape] | None:
        """Return the shapes; None if there is no record, or one of its kernels is not compiled."""
        try:
            stored = json.loads(self._path.read_text())
            shapes = [(int(R), int(count), int(keys)) for R, count, keys in stored["shapes"]]
            kernels = {str(each) for each in stored["kernels"]}
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return shapes if kernels <= set(compiled) else None

    def write(self, shapes: Sequence[WarmUpShape], kernels: Iterable[str]) -> None:
        """Replace the file. If it cannot be written, log a warning: the file is optional."""
        text = json.dumps({"shapes": list(shapes), "kernels": sorted(set(kernels))})
        try:
            write_atomic(self._path, text)
        except OSError as error:
            logger.warning("%s could not be written: %s", self._path, error)
