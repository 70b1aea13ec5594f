"""Checks of the folder that a command will write, before its work. Needs no torch."""

import errno
import os
import shutil
from pathlib import Path

from formats.errors import CheckpointError, DiskError
from formats.table import size_text


def check_is_free(folder: str | Path) -> None:
    """Raise CheckpointError if the folder to write exists and is not empty, or is named *.gguf."""
    path = Path(folder)
    if path.suffix.lower() == ".gguf":
        raise CheckpointError(
            str(path),
            "ends in .gguf, but the output of this format is a folder",
            "remove .gguf from the name, or add --format gguf to write a GGUF file",
        )
    if path.is_dir() and path.samefile(os.curdir):  # which a rename would delete
        raise CheckpointError(
            str(path), "is the current folder, which cannot be replaced", "give a new folder"
        )
    if path.is_dir() and any(path.iterdir()):
        raise CheckpointError(
            str(path), "already exists and is not empty", "give a new folder or empty it"
        )
    if path.exists() and not path.is_dir():
        raise CheckpointError(str(path), "is not a folder", "give a new folder")
    if _is_endless(path):
        raise CheckpointError(str(path), "is a link that leads back to itself", "give a new folder")
    if path.resolve().is_mount():  # such as a volume of a container; a rename cannot replace it
        raise CheckpointError(
            str(path), "is a mount point, which cannot be replaced", f"give {path / 'model'}"
        )


def _is_endless(path: Path) -> bool:
    """Return True if a path is a loop of links."""
    try:
        path.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def check_has_space(folder: str | Path, num_bytes: int) -> None:
    """Raise DiskError unless `folder` can be made on a disk with so many free bytes."""
    place = next(each for each in Path(folder).resolve().parents if each.is_dir())
    if not os.access(place, os.W_OK):
        raise DiskError(str(folder), f"{place} is not writable", "give another folder")
    free = shutil.disk_usage(place).free
    if free < num_bytes:
        raise DiskError(
            str(folder),
            f"needs {size_text(num_bytes)} or more, but {place} has {size_text(free)} free",
            "free some, or give a folder on another disk",
        )
