"""ProfilerConfig: the settings of --profiler-config and of POST /start_profile. Keys are vLLM's."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.errors import InputError

EXAMPLE = 'for example {"profiler": "torch", "torch_profiler_dir": "traces"}'  # remedy
FLAG = "--profiler-config"
KINDS = ("torch", "cuda")
# vLLM's key -> field of ProfilerConfig
NAMES = {
    "profiler": "kind",
    "torch_profiler_dir": "folder",
    "torch_profiler_with_stack": "with_stack",
    "delay_iterations": "delay",
    "max_iterations": "most",
}
# vLLM's keys that are accepted and ignored.
IGNORED = {"torch_profiler_use_gzip", "ignore_frontend", "torch_profiler_dump_cuda_time_total"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerConfig:
    """Settings of one recording."""

    kind: str = "torch"
    folder: str = ""
    with_stack: bool = True
    delay: int = 0  # number of steps before the recording starts
    most: int = 0  # number of steps after which it stops; 0: stop only on request
    prefix: str = ""  # start of the file's name

    @classmethod
    def parse(cls, text: str) -> "ProfilerConfig":
        """Parse a JSON object. Raises InputError."""
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise InputError(FLAG, f"expected a JSON object, found {text!r}", EXAMPLE)
        config = cls(**_known(FLAG, found))
        if config.kind not in KINDS:
            raise InputError(
                FLAG,
                f"expected profiler {' or '.join(KINDS)}, found {config.kind!r}",
                "use torch, which writes traces to a folder",
            )
        if config.kind == "torch" and not config.folder:
            raise InputError(FLAG, "expected torch_profiler_dir, the folder for traces", EXAMPLE)
        return config

    def asked(self, body: dict[str, Any]) -> "ProfilerConfig":
        """Return settings with a client's options. Raises InputError, also for paths as prefix."""
        wanted = {k: v for k, v in body.items() if k in ("delay_iterations", "max_iterations")}
        prefix = body.get("profile_prefix") or ""
        others = body.keys() - {"delay_iterations", "max_iterations", "profile_prefix"}
        if others:
            raise InputError(
                "body", f"has unknown fields: {', '.join(sorted(others))}", "leave them out"
            )
        if not isinstance(prefix, str) or not all(c.isalnum() or c in "-_." for c in prefix):
            raise InputError(
                "profile_prefix",
                f"expected only letters, digits, - _ and ., found {prefix!r:.80}",
                "use a plain name; the folder is torch_profiler_dir",
            )
        return dataclasses.replace(self, prefix=prefix, **_known("body", wanted))

    def path(self, number: int) -> Path:
        """Return the path of a trace's file."""
        name = f"{self.prefix}-" if self.prefix else ""
        return Path(self.folder) / f"{name}rank0.{number}.pt.trace.json.gz"


def _known(source: str, values: dict[str, Any]) -> dict[str, Any]:
    unknown = values.keys() - NAMES.keys() - IGNORED
    if unknown:
        raise InputError(
            source,
            f"has unknown keys: {', '.join(sorted(unknown))}",
            f"known keys: {', '.join(NAMES)}",
        )
    found = {NAMES[key]: value for key, value in values.items() if key in NAMES}
    types = {field.name: field.type for field in dataclasses.fields(ProfilerConfig)}
    for name, value in found.items():
        if type(value) is not types[name] or (types[name] is int and value < 0):
            raise InputError(
                source,
                f"{name}: expected {types[name].__name__}, found {value!r}",
                "leave it out to use the default",
            )
    return found
