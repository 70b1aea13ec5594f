"""transformers' tokenizer of a model folder. Imports nothing of the folder's model.

AutoTokenizer loads the class of the folder's config before anything else, and with it the compiler
of torch and more: a second or two. Where tokenizer_config.json names the tokenizer's class, it
reads no more of a config than fields, which a config without a class has, too.
"""

import json
from pathlib import Path
from typing import Any


def load_tokenizer(folder: str | Path) -> Any:
    """Runs no code from the folder. Raises whatever transformers and the files' parsers raise."""
    # Here: it takes seconds, while an engine process starts.
    from transformers import AutoTokenizer

    given = {"trust_remote_code": False, "local_files_only": True}
    if _names_its_class(folder):
        given["config"] = _bare_config(folder)
    return AutoTokenizer.from_pretrained(str(folder), **given)


def _names_its_class(folder: str | Path) -> bool:
    stated = _read(folder, "tokenizer_config.json")
    return isinstance(stated.get("tokenizer_class"), str) and "auto_map" not in stated


def _bare_config(folder: str | Path) -> Any:
    """The fields of config.json. None, which stands for "not given": it cannot be read."""
    from transformers import PreTrainedConfig

    values = _read(folder, "config.json")
    try:
        return PreTrainedConfig.from_dict(values, name_or_path=str(folder)) if values else None
    except Exception:  # AutoTokenizer says what is wrong with it
        return None


def _read(folder: str | Path, name: str) -> dict:
    """A file of JSON; {} where there is none, or no object in it."""
    try:
        found = json.loads((Path(folder) / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
