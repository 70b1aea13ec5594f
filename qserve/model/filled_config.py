"""config.json with transformers' defaults filled in, cached on disk between starts.

Importing transformers and its config classes takes 3 to 6 seconds, a third of a start with compiled
kernels. The filled config is cached as JSON; the key is made from the contents of config.json and
the version of transformers. On a cache miss transformers fills in the defaults again.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from formats.files.atomic_file import write_atomic

FORMAT = 1  # version of the cache file
NO_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))


def filled_config(stated: Mapping[str, Any], defaults_of: str = "") -> dict[str, Any]:
    """Return `stated`, the contents of config.json, with defaults filled in.

    `defaults_of`: model_type whose defaults to use, without those of special tokens; empty: the
    stated one. Raises any exception of transformers.
    """
    if defaults_of:
        filled = filled_config({**NO_TOKENS, **stated, "model_type": defaults_of})
        return {**filled, "model_type": stated.get("model_type")}
    place = _folder() / f"{_key(stated)}.json"
    values = _read(place)
    if values is None:
        values = _by_transformers(stated)
        _keep(place, values)
    return values


def _by_transformers(stated: Mapping[str, Any]) -> dict[str, Any]:
    from transformers import AutoConfig

    others = {key: value for key, value in stated.items() if key != "model_type"}
    config = AutoConfig.for_model(stated["model_type"], **others)
    return json.loads(config.to_json_string(use_diff=False))


def _key(stated: Mapping[str, Any]) -> str:
    text = json.dumps([["transformers", _version(), FORMAT], stated], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@functools.cache
def _version() -> str:
    return importlib.metadata.version("transformers")


def _folder() -> Path:
    # Not Path.home(), which raises for a container user without a home.
    return Path(os.path.expanduser("~/.cache/qserve/configs"))


def _read(place: Path) -> dict[str, Any] | None:
    """Read a cached config. Returns None if the file is missing or damaged."""
    try:
        values = json.loads(place.read_text())
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def _keep(place: Path, values: dict[str, Any]) -> None:
    """Write the cache file atomically. Does nothing if the folder is not writable."""
    with contextlib.suppress(OSError):
        write_atomic(place, json.dumps(values))
