"""Folders of small files that are made from a model in another format, in the user's cache."""

import atexit
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from formats.errors import CHECK_ACCESS, CheckpointError

# content of each file by its name
Contents = Mapping[str, str | bytes]


def made_folder(kind: str, name: str, index: str, key: Any, make: Callable[[], Contents]) -> Path:
    """Return the folder `name` for a key; make it if it does not exist yet.

    `kind`: folder of the cache. `index`: a file that every such folder has. `key`: JSON of
    everything that the contents depend on.
    """
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
    folder = Path(os.path.expanduser(f"~/.cache/qserve/{kind}")) / digest / name
    if (folder / index).is_file():
        return folder
    contents = make()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return _write(folder, index, contents)
    except OSError:  # no home, or a full or read-only disk
        parent = Path(tempfile.mkdtemp(prefix=f"qserve-{kind}-"))
        atexit.register(shutil.rmtree, parent, ignore_errors=True)
        return _write(parent / name, index, contents)


def fingerprint(path: Path) -> list[Any]:
    """Return a file's path, size and time of change. Raises CheckpointError."""
    try:
        status = path.stat()
    except OSError as error:
        raise CheckpointError(
            str(path), f"cannot be read: {error.strerror}", CHECK_ACCESS
        ) from None
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]


def _write(folder: Path, index: str, contents: Contents) -> Path:
    """Write the folder under another name and rename it.

    With several writers, the first one wins.
    """
    staging = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    try:
        for name, content in contents.items():
            data = content.encode() if isinstance(content, str) else content
            (staging / name).write_bytes(data)
        staging.chmod(0o755)
        try:
            staging.rename(folder)
        except OSError:
            if not (folder / index).is_file():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder
