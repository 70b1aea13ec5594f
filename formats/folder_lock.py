"""A folder, or a file, that one process writes at a time. Knows nothing of what is written."""

import fcntl
import os
import shutil
from pathlib import Path


def make_locked(folder: Path) -> int:
    """An empty folder that no other process holds; a descriptor that holds it until it is closed.

    The system drops the lock of a process that dies. Raises BlockingIOError where another has it.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # the holder has just published or dropped it: make it anew
            continue
        try:
            lock(descriptor)
            if is_still_named(descriptor, folder):
                for path in folder.iterdir():  # a killed run's
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def lock(descriptor: int) -> None:
    """Hold a file until the descriptor is closed. Raises BlockingIOError where another has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass  # a file system without locks, such as some of a network: two runs are not kept apart


def is_still_named(descriptor: int, path: Path) -> bool:
    """Did a folder or file keep its name until it was locked?"""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
