"""config.json with the defaults that transformers fills in, remembered from one start to the next.

Importing transformers and its config classes takes 3 to 6 seconds, a third of a start whose kernels
are compiled. What they made of a config.json is kept as JSON under a key of the file's contents and
of transformers' version; without it they are asked again.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from formats.whole_file import write_whole

FORMAT = 1  # of what is kept


def filled_config(stated: Mapping[str, Any]) -> dict[str, Any]:
    """All keys of a config; `stated` are config.json's. Raises whatever transformers raises."""
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
    made_by = ["transformers", importlib.metadata.version("transformers"), FORMAT]
    text = json.dumps([made_by, stated], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _folder() -> Path:
    # not Path.home(): that raises where a container's user has none
    return Path(os.path.expanduser("~/.cache/qserve/configs"))


def _read(place: Path) -> dict[str, Any] | None:
    """None where it is not there, or damaged."""
    try:
        values = json.loads(place.read_text())
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def _keep(place: Path, values: dict[str, Any]) -> None:
    """Whole or not at all. A folder that cannot be written costs the next start its time."""
    with contextlib.suppress(OSError):
        write_whole(place, json.dumps(values))
