"""Answers of a batch on their way to the output file; an interrupted run can resume.

Answers are appended to a partial file next to the output. The partial file gets the output's name
once there is an answer for every line.
"""

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from formats.errors import InputError, one_line
from formats.files.folder_lock import is_still_named, lock

Key = str | int


class BatchAnswers:
    """Partial file of answers. `digest` identifies the input: other input starts a new file."""

    def __init__(self, target: Path, digest: str) -> None:
        """Open the file and read the keys of answers from an earlier run. Raises InputError."""
        self.target = target
        self.partial = target.with_name(f"{target.name}.{digest[:12]}.partial")
        self.num_failed = 0
        if target.is_dir():
            raise InputError(str(target), "is a folder", "give a path of a file for the answers")
        try:
            self._file = _open_alone(self.partial)
            self.answered = self._read()
        except BlockingIOError as error:
            raise InputError(
                str(self.partial),
                "is being written by another run",
                "wait for that run, or stop it",
            ) from error
        except OSError as error:
            raise InputError(str(target), f"cannot be written: {one_line(error)}") from error

    def write(self, answer: dict[str, Any]) -> None:
        """Append an answer. After the return it survives a crash. Raises InputError."""
        self.num_failed += answer["error"] is not None
        try:
            self._file.write(json.dumps(answer).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise InputError(
                str(self.partial),
                f"cannot be written: {one_line(error)}",
                "free some space and run the same command again: it resumes with the "
                "answers written",
            ) from error

    def publish(self) -> None:
        """Rename the file to the output. Its contents are on disk before."""
        os.fsync(self._file.fileno())
        self.partial.replace(self.target)

    def close(self) -> None:
        """Close the file; delete it if it has no answer."""
        descriptor = self._file.fileno()
        if not os.fstat(descriptor).st_size and is_still_named(descriptor, self.partial):
            self.partial.unlink()
        # After a full disk the buffer still holds the rejected bytes, and flushing would fail
        # again.
        with contextlib.suppress(OSError):
            self._file.close()

    def _read(self) -> set[Key]:
        """Keys of an earlier run's answers. An incomplete last line is dropped."""
        found, end = set(), 0
        self._file.seek(0)
        for line in self._file:
            try:
                if line.endswith(b"\n"):
                    answer = json.loads(line)
                    found.add(key_of(answer))
                    self.num_failed += answer["error"] is not None
                    end += len(line)
                    continue
            except (ValueError, LookupError, TypeError):
                pass
            self._file.truncate(end)
            break
        return found


def digest(content: bytes, *settings: Any) -> str:
    """Hash of everything that the answers depend on: the input's bytes, and the model settings."""
    return hashlib.sha256(content + repr(settings).encode()).hexdigest()


def key_of(answer: dict[str, Any]) -> Key:
    """Key of the answered line: its custom_id, or the line number for an invalid line."""
    error = answer["error"] or {}
    return error.get("line", answer["custom_id"])


def _open_alone(path: Path) -> BinaryIO:
    """Open a file for appending with an exclusive lock. Raises BlockingIOError if it is taken."""
    while True:
        file = path.open("a+b")
        try:
            lock(file.fileno())
            if is_still_named(file.fileno(), path):
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # the other run has just published it
