"""What a model folder holds besides weights and config, and what goes along into a new one.

Knows names, not contents, but for the folders that modules.json lists.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from formats.errors import CheckpointError

MODULES = "modules.json"
# Tokenizer, template, generation defaults; of a model that makes vectors, how it makes them.
SIDE_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    MODULES,
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
)
# A folder without any of these has no tokenizer.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# Of the folders of modules. Pickles stay behind: nobody here reads them.
MODULE_SUFFIXES = (".json", ".safetensors")


def find_side_files(folder: Path) -> list[Path]:
    """What SIDE_FILES names and a folder has, and the files of its modules, relative to it.

    Raises CheckpointError where one cannot be read.
    """
    found = []
    names = [Path(name) for name in SIDE_FILES]
    for name in [*names, *_module_files(folder)]:
        path = folder / name
        try:
            if path.is_file():
                path.open("rb").close()
                found.append(name)
            elif path.is_symlink() and not path.exists():
                raise CheckpointError(str(path), "is a link to nothing", "fetch it again")
        except OSError as error:
            raise CheckpointError(str(path), f"cannot be read: {error.strerror}") from None
    return found


def copy_side_files(folder: Path, target: Path) -> None:
    """Copy them to another folder. Raises CheckpointError as find_side_files does, and OSError."""
    for name in find_side_files(folder):
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(folder / name, target / name)


def _module_files(folder: Path) -> Iterator[Path]:
    """Files of the folders that modules.json lists, where they are plain folders in this one."""
    try:
        modules = json.loads((folder / MODULES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # none, or one that its readers will refuse
    for module in modules if isinstance(modules, list) else []:
        place = module.get("path") if isinstance(module, dict) else None
        if not isinstance(place, str) or place in ("", "..") or Path(place).name != place:
            continue
        if (folder / place).is_dir():
            files = sorted((folder / place).iterdir())
            yield from (Path(place) / f.name for f in files if f.suffix in MODULE_SUFFIXES)
