"""The answers of a batch on their way to its output file: a killed run goes on where it was.

They collect beside the output, each in the file before the next is awaited, and get the output's
name when there is one for every line. Knows no server.
"""

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from formats.errors import InputError, one_line
from formats.folder_lock import is_still_named, lock

Key = str | int


class BatchAnswers:
    """The file of answers. `digest` says what they answer: other input does not go on with them."""

    def __init__(self, target: Path, digest: str) -> None:
        """Open it and read the keys of what an earlier run answered. Raises InputError."""
        self.target = target
        self.partial = target.with_name(f"{target.name}.{digest[:12]}.partial")
        self.num_failed = 0
        if target.is_dir():
            raise InputError(str(target), "is a folder", "give a file for the answers")
        try:
            self._file = _open_alone(self.partial)
            self.answered = self._read()
        except BlockingIOError as error:
            raise InputError(
                str(self.partial), "another run writes it now", "wait for that, or end it"
            ) from error
        except OSError as error:
            raise InputError(str(target), f"cannot be written: {one_line(error)}") from error

    def write(self, answer: dict[str, Any]) -> None:
        """Add an answer. Once this returns it outlives the process. Raises InputError."""
        self.num_failed += answer["error"] is not None
        try:
            self._file.write(json.dumps(answer).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise InputError(
                str(self.partial),
                f"cannot be written: {one_line(error)}",
                "make room and run the same command again: it goes on with what is there",
            ) from error

    def publish(self) -> None:
        """Give the file the output's name. It is whole on the disk before."""
        os.fsync(self._file.fileno())
        self.partial.replace(self.target)

    def close(self) -> None:
        """Let go of the file. One without an answer is no use to another run."""
        descriptor = self._file.fileno()
        if not os.fstat(descriptor).st_size and is_still_named(descriptor, self.partial):
            self.partial.unlink()
        # After a full disk the buffer holds what the disk refused, and would be refused again.
        with contextlib.suppress(OSError):
            self._file.close()

    def _read(self) -> set[Key]:
        """The keys of an earlier run's answers. What was cut off at its end is dropped."""
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
    """What a batch's answers depend on: the input's bytes, and the settings that choose models."""
    return hashlib.sha256(content + repr(settings).encode()).hexdigest()


def key_of(answer: dict[str, Any]) -> Key:
    """Which line of the input an answer is of: its custom_id, or of a wrong line its number."""
    error = answer["error"] or {}
    return error.get("line", answer["custom_id"])


def _open_alone(path: Path) -> BinaryIO:
    """A file to append to that no other process has. Raises BlockingIOError where one has it."""
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
