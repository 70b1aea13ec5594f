"""FolderConnector: KV pages as files in a folder that several engines share.

A file consists of MAGIC, the page's key, the page, and an HMAC-SHA-256 of everything before it. The
file is written under another name and then renamed, so that no reader sees a partial file. A file
with the wrong length, a non-regular file, and a file with the wrong HMAC are rejected and removed.
If a secret is the HMAC's key, files from writers without the secret are rejected too. When the
folder exceeds its limit, the least recently loaded files are removed.
"""

import contextlib
import hmac
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from formats.errors import InputError, one_line
from qserve.errors import LEAVE_OUT
from qserve.kv_transfer.config import FLAG
from qserve.kv_transfer.secret import read_secret

MAGIC = b"qserveKV2\0\0\0\0\0\0\0"
KEY_BYTES = DIGEST_BYTES = 32
OVERHEAD = len(MAGIC) + KEY_BYTES + DIGEST_BYTES
SUFFIX, PARTIAL = ".kv", ".partial"
SET_ASIDE = ".not-a-page"  # suffix for renaming a folder that has the name of a page
SETTINGS = ("path", "max_gb", "secret_file")
DEFAULT_GB = 16.0
GIB = 2**30
# After writing this fraction of the limit, all files are counted again: other engines write too.
RECOUNT_SHARE = 1 / 20
KEPT_SHARE = 0.9  # fraction of the limit that is kept when files are removed
ABANDONED_SECONDS = 600.0  # a partial file of this age is assumed to have no writer

logger = logging.getLogger(__name__)


class FolderConnector:
    """Pages of one size in a folder, which may also hold pages of other models."""

    def __init__(
        self, path: Path, page_bytes: int, *, max_bytes: float = DEFAULT_GB * GIB, secret: bytes
    ) -> None:
        """Create the folder if it is missing. Raises InputError on failure."""
        self.path, self._page_bytes, self._max_bytes = path, page_bytes, int(max_bytes)
        self._secret = secret
        self._lock = threading.Lock()
        self._bytes_since_count = 0
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._prune()
        except OSError as error:
            raise InputError(
                f"{FLAG} path",
                f"{path} cannot be used: {one_line(error)}",
                "specify a folder that can be created",
            ) from error

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], page_bytes: int) -> "FolderConnector":
        """Create a connector from kv_connector_extra_config. Raises InputError."""
        settings = dict(settings)
        if "shared_storage_path" in settings:  # vLLM's name
            settings["path"] = settings.pop("shared_storage_path")
        unknown = settings.keys() - set(SETTINGS)
        if unknown:
            raise InputError(
                f"{FLAG} kv_connector_extra_config",
                f"has unknown keys: {', '.join(sorted(unknown))}",
                f"known keys: {', '.join(SETTINGS)}",
            )
        path, most = settings.get("path"), settings.get("max_gb", DEFAULT_GB)
        if not isinstance(path, str) or not path:
            raise InputError(
                f"{FLAG} path",
                f"expected a folder, found {path!r}",
                "give the path of a folder that all engines can write to",
            )
        if isinstance(most, bool) or not isinstance(most, int | float) or not most > 0:
            raise InputError(
                f"{FLAG} max_gb", f"expected a number above 0, found {most!r}", LEAVE_OUT
            )
        secret = read_secret(settings.get("secret_file"))
        return cls(Path(path), page_bytes, max_bytes=most * GIB, secret=secret)

    def match(self, keys: Sequence[bytes]) -> int:
        for count, key in enumerate(keys):
            if not self._is_there(key):
                return count
        return len(keys)

    def load(self, key: bytes, page: memoryview) -> bool:
        path = self._path(key)
        try:
            # Opening a pipe could block forever, and a link may point anywhere.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError as error:
            return self._refuse(path, str(error))
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            return self._refuse(path, "is not a regular file")
        with open(descriptor, "rb", buffering=0) as file:
            if status.st_size != self._page_bytes + OVERHEAD:
                found = f"{status.st_size} bytes, expected {self._page_bytes + OVERHEAD}"
                return self._refuse(path, f"has {found}")
            head = file.read(len(MAGIC) + KEY_BYTES)
            if head != MAGIC + key:
                return self._refuse(path, "holds the page of another key")
            start = 0
            while start < len(page):
                count = file.readinto(page[start:])
                if not count:
                    return self._refuse(path, "is truncated")
                start += count
            if not secrets.compare_digest(file.read(DIGEST_BYTES), self._digest(head, page)):
                return self._refuse(path, "fails its checksum")
            with contextlib.suppress(OSError):
                os.utime(descriptor)  # mark the file as recently used
        return True

    def save(self, key: bytes, page: memoryview) -> None:
        if self._is_there(key):
            return
        path, head = self._path(key), MAGIC + key
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if path.parent.is_symlink():
            raise OSError(f"{path.parent} is a link, which may point outside of {self.path}")
        partial = path.with_name(f"{secrets.token_hex(8)}{PARTIAL}")
        try:
            with open(partial, "xb") as file:
                file.write(head)
                file.write(page)
                file.write(self._digest(head, page))
            if path.is_dir() and not path.is_symlink():
                self._refuse(path, "is a folder")
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
        with self._lock:
            self._bytes_since_count += self._page_bytes + OVERHEAD
            if self._bytes_since_count > RECOUNT_SHARE * self._max_bytes:
                self._prune()

    def _is_there(self, key: bytes) -> bool:
        try:
            status = os.lstat(self._path(key))
        except FileNotFoundError:
            return False
        is_page = not stat.S_ISDIR(status.st_mode)
        return is_page and status.st_size == self._page_bytes + OVERHEAD

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.path / name[:2] / f"{name}{SUFFIX}"

    def _digest(self, head: bytes, page: memoryview) -> bytes:
        digest = hmac.new(self._secret, head, "sha256")
        digest.update(page)
        return digest.digest()

    def _refuse(self, path: Path, reason: str) -> bool:
        """Remove an invalid file, so that its page can be saved again. Returns False.

        A folder is renamed instead.
        """
        logger.warning("KV page %s %s; removed, will be recomputed", path, reason)
        with contextlib.suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                os.rename(path, path.with_name(f"{path.name}.{secrets.token_hex(8)}{SET_ASIDE}"))
            else:
                os.unlink(path)
        return False

    def _prune(self) -> None:
        """Add up the file sizes; if they exceed the limit, remove the least recently used files."""
        self._bytes_since_count = 0
        found, now = [], time.time()
        for folder in _entries(self.path):
            if len(folder.name) != 2 or not folder.is_dir(follow_symlinks=False):
                continue
            for entry in _entries(folder.path):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(SUFFIX):
                        found.append((status.st_mtime, status.st_size, entry.path))
                    elif entry.name.endswith(PARTIAL) and now - status.st_mtime > ABANDONED_SECONDS:
                        os.unlink(entry.path)
        total = sum(size for _, size, _ in found)
        if total <= self._max_bytes:
            return
        for _, size, path in sorted(found):
            if total <= KEPT_SHARE * self._max_bytes:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size


def _entries(path: str | Path) -> list[os.DirEntry]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
