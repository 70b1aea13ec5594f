"""A small file that others may read at any moment: it is replaced at once, never half written."""

import os
import threading
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Make the folder, and put the file there under its name when it is complete. Raises OSError.

    Two writers do not meet: the last to end wins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
