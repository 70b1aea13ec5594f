"""BatchAnswers: collects the answers of a batch, so that an interrupted run can resume.

Answers are appended to a partial file next to the output. When every line has an answer, the
partial file is renamed to the output.
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
FILE = "give a path of a file for the answers"  # a remedy


class BatchAnswers:
    """Partial file of answers. `digest` identifies the input; another input starts a new file."""

    def __init__(self, target: Path, digest: str) -> None:
        """Open the file and read the keys of answers from an earlier run. Raises InputError."""
        if target.is_dir():  # first: "." has no name
            raise InputError(str(target), "is a folder", FILE)
        # the output takes the place of what has its name: of a link's file, never of a device
        if target.exists() and not target.is_file():
            raise InputError(str(target), "is a pipe or a device", FILE)
        self.target = Path(os.path.realpath(target))
        self.partial = self.target.with_name(f"{self.target.name}.{digest[:12]}.partial")
        self.num_failed = 0
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
            raise InputError(
                str(target), f"cannot be written: {one_line(error)}", "choose another file"
            ) from error

    def write(self, answer: dict[str, Any]) -> None:
        """Append an answer, which then survives a crash of this process. Raises InputError."""
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
        """Sync the file to disk, then rename it to the output."""
        os.fsync(self._file.fileno())
        self.partial.replace(self.target)

    def close(self) -> None:
        """Close the file; delete it if it has no answer."""
        descriptor = self._file.fileno()
        if not os.fstat(descriptor).st_size and is_still_named(descriptor, self.partial):
            self.partial.unlink()
        # If the disk was full, the buffer still has the rejected bytes, and flushing fails again.
        with contextlib.suppress(OSError):
            self._file.close()

    def _read(self) -> set[Key]:
        """Read the keys of an earlier run's answers. An incomplete last line is dropped."""
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
    """Return the SHA-256 of the input's bytes and of the settings that answers depend on."""
    return hashlib.sha256(content + repr(settings).encode()).hexdigest()


def key_of(answer: dict[str, Any]) -> Key:
    """Return the key of an answer: the custom_id, or the line number of an invalid line."""
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
        file.close()  # another run has renamed the file meanwhile; open a new one
