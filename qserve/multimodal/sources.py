"""Reading of an image or a video by its URL: data:, http(s):, or file: in an allowed folder."""

import base64
import binascii
import os
import re
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from formats.errors import InputError
from qserve.multimodal.fetch import fetch
from qserve.multimodal.settings import FLAG, MediaLimits

SUBJECT = "media URL"
SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,20}(?=:)")
DATA_HEAD = re.compile(r"data:([^,;]{0,100})((?:;[^,;]{0,100}){0,8}?)(;base64)?,", re.IGNORECASE)
# kind -> allowed prefixes of the media type in a data: URL; a URL without a media type is allowed
TYPES = {
    "image": ("image/", "application/octet-stream"),
    "video": ("video/", "image/gif", "image/webp", "application/octet-stream"),
}
LOCAL_FLAG = "--allowed-local-media-path"
SPACES = str.maketrans("", "", " \t\r\n")


def read_source(url: str, limits: MediaLimits, ends: float, kind: str = "image") -> bytes:
    """Return the bytes of the file at a URL. Raises InputError.

    `ends`: deadline, as a value of time.monotonic(). `kind`: image or video.
    """
    found = SCHEME.match(url)
    scheme = found[0].lower() if found else ""
    if scheme == "data":
        return read_data_url(url, limits.num_bytes(kind), kind)
    if scheme in ("http", "https"):
        if not limits.hosts:
            raise InputError(
                SUBJECT,
                "this server fetches no media",
                f"send it as a data: URL, or start the server with {FLAG}",
            )
        return fetch(url, limits, ends, kind)
    if scheme == "file":
        if limits.local_path is None:
            raise InputError(
                SUBJECT,
                "this server reads no local files",
                f"send it as a data: URL, or start the server with {LOCAL_FLAG}",
            )
        return _read_file(url, limits.local_path, limits.num_bytes(kind))
    raise InputError(
        SUBJECT, f"expected data:, http:, https: or file:, found {url[:50]!r}", "use a data: URL"
    )


def read_data_url(url: str, max_bytes: int, kind: str = "image") -> bytes:
    """Decode the bytes in a data: URL. Raises InputError."""
    head = DATA_HEAD.match(url)
    if head is None or not head[3]:
        raise InputError(
            SUBJECT,
            f"expected data:{kind}/TYPE;base64, and base64 text, found {url[:40]!r}",
            "encode the file's bytes",
        )
    if head[1] and not head[1].lower().startswith(TYPES[kind]):
        a_kind = "an image" if kind == "image" else f"a {kind}"
        raise InputError(
            SUBJECT,
            f"expected the media type of {a_kind}, found {head[1]!r}",
            "send a file of that kind",
        )
    if len(url) - head.end() > max_bytes * 3:  # too large even if each character is %-escaped
        raise _too_large(max_bytes)
    text = url[head.end() :]
    if "%" in text:
        text = unquote(text)
    text = text.translate(SPACES)
    if len(text) * 3 // 4 > max_bytes + 2:
        raise _too_large(max_bytes)
    try:
        found = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise InputError(SUBJECT, "is not valid base64", "encode the file's bytes") from None
    if not found:
        raise InputError(SUBJECT, "is empty", "send the bytes of a file")
    if len(found) > max_bytes:
        raise _too_large(max_bytes)
    return found


def _too_large(max_bytes: int) -> InputError:
    return InputError(SUBJECT, f"has more than {max_bytes} bytes", "send a smaller file")


def _read_file(url: str, folder: str, max_bytes: int) -> bytes:
    """Read a file in a folder or its subfolders. Links may not lead out of it."""
    refused = InputError(
        SUBJECT, f"names no regular file below {LOCAL_FLAG}", "send it as a data: URL"
    )
    try:
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise refused
        root = Path(folder).resolve(strict=True)
        path = Path(unquote(parts.path)).resolve(strict=True)
        if not path.is_relative_to(root):
            raise refused
        # `path` has no links now, but one may appear before the next line. O_NOFOLLOW refuses a
        # link at its end. For one elsewhere in the path the check after opening fails.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise refused
            again = Path(unquote(parts.path)).resolve(strict=True)
            if again != path or not os.path.samestat(os.stat(path), os.fstat(handle)):
                raise refused
            found = file.read(max_bytes + 1)
    except (OSError, ValueError, RuntimeError):  # RuntimeError: links that form a circle
        raise refused from None
    if len(found) > max_bytes:
        raise _too_large(max_bytes)
    return found
