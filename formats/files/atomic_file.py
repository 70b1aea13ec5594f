"""Atomic replacement of a small file that other processes read."""

import os
import threading
from pathlib import Path


def write_atomic(path: Path, text: str) -> None:
    """Create the folder if needed, and replace the file by a rename. Raises OSError.

    If two processes write the file concurrently, the last one to finish wins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
