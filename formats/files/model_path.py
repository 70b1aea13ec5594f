"""Model arguments that are GGUF files, or folders in Mistral's format.

Imports a reader only for such a model.
"""

import json
import re
from pathlib import Path, PurePosixPath

from formats.errors import CheckpointError

INDEX = "gguf.json"  # in a folder that was made from a GGUF file
SUFFIX = ".gguf"
ADAPTER = "adapter_config.json"  # of PEFT
MISTRAL_INDEX = "mistral.json"  # in a folder that was made from one in Mistral's format
SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def find_gguf(path: str | Path) -> Path | None:
    """Return the GGUF file that a model argument refers to; None: it is not a GGUF file.

    A folder without other weights refers to its only GGUF file, or the first of a split model.
    Raises CheckpointError if the folder has several models.
    """
    path = Path(path)
    if path.suffix == SUFFIX and not path.is_dir():
        return path
    if not path.is_dir() or (path / INDEX).exists():
        return None
    try:
        names = sorted(each.name for each in path.iterdir())
    except OSError:
        return None
    found = [name for name in names if name.endswith(SUFFIX) and not name.startswith("mmproj")]
    if not found or any(
        name.endswith((".safetensors", ".safetensors.index.json")) for name in names
    ):
        return None
    models = {stem(name): name for name in reversed(found)}
    if len(models) > 1:
        raise CheckpointError(
            str(path), f"holds {len(models)} GGUF models: {', '.join(found[:8])}", "give one file"
        )
    return path / next(iter(models.values()))


def stem(name: str) -> str:
    """Return a file's name without the number of a split model's file and the suffix."""
    match = SPLIT_NAME.fullmatch(name)
    return match["stem"] if match else name.removesuffix(SUFFIX)


def model_folder(path: str | Path) -> Path:
    """Return the model folder for an argument.

    For a GGUF file or a folder in Mistral's format, it is a folder made from it. Raises
    CheckpointError.
    """
    file = find_gguf(path)
    if file is not None:
        from formats.gguf.folder import folder_of_file  # imports the tables of all architectures

        return folder_of_file(file)
    if is_in_mistral_format(Path(path)):
        from formats.mistral.folder import folder_of_mistral

        return folder_of_mistral(Path(path))
    return Path(path)


def check_is_no_adapter(folder: Path) -> None:
    """Raise CheckpointError if a folder has an adapter's config and no model's."""
    if (folder / ADAPTER).is_file() and not (folder / "config.json").exists():
        raise CheckpointError(
            str(folder),
            f"is a LoRA adapter ({ADAPTER}), not a model",
            "serve it with its model: qserve serve MODEL --enable-lora --lora-modules"
            f" NAME={folder}; or add it to the weights: qserve merge MODEL {folder} -o OUTPUT",
        )


def is_file_inside(name: object) -> bool:
    """Return True for a relative path of a file inside a folder, as an index may list it."""
    if not isinstance(name, str) or "\\" in name or "\0" in name:
        return False
    path = PurePosixPath(name)
    return bool(path.name) and str(path) == name and not {"/", ".."} & set(path.parts)


def is_foreign(path: str | Path) -> bool:
    """Return True if a folder is made for an argument that exists. Raises CheckpointError."""
    found = Path(path)
    return found.exists() and (find_gguf(found) is not None or is_in_mistral_format(found))


def is_in_mistral_format(folder: Path) -> bool:
    """Return True for a folder with params.json and weights in Mistral's files alone."""
    if not (folder / "params.json").is_file():
        return False
    names = [path.name for path in folder.glob("*.safetensors*")]
    own = [name for name in names if name.startswith("consolidated")]
    others = [name for name in names if name.startswith("model")]
    return any(name.endswith(".safetensors") for name in own) and not others


def is_mistral_folder(folder: Path) -> bool:
    """Return True if a folder was made from one in Mistral's format (mistral/folder.py)."""
    return (folder / MISTRAL_INDEX).is_file()


def is_gguf_folder(folder: Path) -> bool:
    """Return True if a folder was made from a GGUF file (gguf/folder.py)."""
    return (folder / INDEX).is_file()


def gguf_name(folder: str | Path) -> str:
    """Return the name of the GGUF file that a folder was made from; "" for an ordinary folder."""
    path = Path(folder)
    return path.name if (path / INDEX).is_file() else ""


def origin(folder: str | Path) -> Path:
    """Return the GGUF file or folder that a folder was made from; else the folder itself."""
    path = Path(folder)
    try:
        if is_mistral_folder(path):
            return Path(json.loads((path / MISTRAL_INDEX).read_text(encoding="utf-8"))["source"])
        return Path(json.loads((path / INDEX).read_text(encoding="utf-8"))["files"][0][0])
    except (OSError, ValueError, LookupError, TypeError):
        return path
