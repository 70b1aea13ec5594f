"""Unfinished files and folders of this process, which an abrupt end must remove.

Writers stage their output under another name, and remove it when they fail. A process that ends
without unwinding its stack (Ctrl-C during an import) calls `remove_all` instead. Needs no torch.
"""

import shutil
from contextlib import suppress
from pathlib import Path

_unfinished: set[Path] = set()


def register(path: Path) -> None:
    """Record a file or folder that is not finished."""
    _unfinished.add(path)


def release(path: Path) -> None:
    """Forget a file or folder: it is finished, removed, or kept for the user."""
    _unfinished.discard(path)


def remove_all() -> None:
    """Delete every registered file and folder."""
    while _unfinished:
        path = _unfinished.pop()
        shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            path.unlink()
