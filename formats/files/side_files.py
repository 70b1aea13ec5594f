"""Side files of a model folder (tokenizer, template), which are copied to a new folder.

Only modules.json is parsed, for the folders that it lists.
"""

import json
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from formats.errors import CHECK_ACCESS, DOWNLOAD_AGAIN, CheckpointError

MODULES = "modules.json"
CHANNEL_FACTORS = "channel_factors.st"  # formats/files/channel_factors.py
# Tokenizer, template, generation defaults, image processor, the pooling of embedding models, and
# factors for adapters.
SIDE_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer.jsonl",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    MODULES,
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    CHANNEL_FACTORS,
)
# A folder without any of these has no tokenizer.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer.jsonl", "vocab.json")
# Files in the folders of modules. Pickles are not copied, because they are not read.
MODULE_SUFFIXES = (".json", ".safetensors")


def find_side_files(folder: Path) -> list[Path]:
    """Return relative paths of a folder's side files, including those of its modules.

    Raises CheckpointError if one cannot be read or is a link out of the folder.
    """
    found = []
    names = [Path(name) for name in SIDE_FILES]
    for name in [*names, *_module_files(folder)]:
        path = folder / name
        try:
            if path.is_file():
                _check_inside(path, folder)
                path.open("rb").close()
                found.append(name)
            elif path.is_symlink() and not path.exists():
                raise CheckpointError(str(path), "is a link to nothing", DOWNLOAD_AGAIN)
        except OSError as error:
            raise CheckpointError(
                str(path), f"cannot be read: {error.strerror}", CHECK_ACCESS
            ) from None
    return found


def copy_side_files(folder: Path, target: Path) -> None:
    """Copy a folder's side files to another folder. Raises CheckpointError and OSError.

    A copy is readable by group and others only if the original is.
    """
    for name in find_side_files(folder):
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(folder / name, target / name)
        readers = stat.S_IMODE((folder / name).stat().st_mode) & 0o044
        now = stat.S_IMODE((target / name).stat().st_mode)
        (target / name).chmod(now & (readers | ~0o077))


def _check_inside(path: Path, folder: Path) -> None:
    """Raise CheckpointError if a link leads out of a model's folder, for example to a private file.

    A snapshot of the hub cache is a folder of links into `blobs`, next to `snapshots`; the model
    may be in a subfolder of the snapshot.
    """
    found, root = path.resolve(), folder.resolve()
    allowed = [root]
    for parent in root.parents:
        if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
            allowed.append(parent.parent / "blobs")
    if not any(found.is_relative_to(place) for place in allowed):
        raise CheckpointError(
            str(path),
            "is a link out of the model's folder, and its text would be copied",
            "replace the link by the file, if it belongs to the model",
        )


def _module_files(folder: Path) -> Iterator[Path]:
    """Return files of the folders that modules.json lists, if they are direct subfolders."""
    try:
        modules = json.loads((folder / MODULES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # missing, or invalid: its readers refuse it
    for module in modules if isinstance(modules, list) else []:
        place = module.get("path") if isinstance(module, dict) else None
        if not isinstance(place, str) or place in ("", "..") or Path(place).name != place:
            continue
        if (folder / place).is_dir():
            files = sorted((folder / place).iterdir())
            yield from (Path(place) / f.name for f in files if f.suffix in MODULE_SUFFIXES)
