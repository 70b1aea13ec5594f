"""Locks on a folder or a file, so that one process writes it at a time."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


def make_locked(folder: Path) -> int:
    """Create an empty, locked folder; return the descriptor that holds the lock.

    Closing the descriptor, or the end of the process, releases the lock. Raises BlockingIOError if
    another process holds it.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # the holder has just published or deleted the folder: retry
            continue
        try:
            lock(descriptor)
            if is_still_named(descriptor, folder):
                for path in folder.iterdir():  # files left by a killed run
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def lock(descriptor: int) -> None:
    """Lock an open file until it is closed.

    Raises BlockingIOError if another process holds the lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass  # some network file systems have no locks: there, two runs are not kept apart


@contextlib.contextmanager
def waiting_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which is created if needed; wait while another process holds it.

    Raises OSError if the file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def is_still_named(descriptor: int, path: Path) -> bool:
    """Return True if a locked folder or file still has its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
