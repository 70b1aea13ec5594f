"""JSON objects of a model folder, read with limits on size and numbers."""

import json
import stat
from pathlib import Path
from typing import Any

from formats.errors import CHECK_ACCESS, DOWNLOAD_AGAIN, CheckpointError

MAX_JSON_BYTES = 25_000_000
MAX_FLOAT32 = (2 - 2**-23) * 2.0**127


def fits_float32(value: float) -> bool:
    """Return True if a number is finite as a float32."""
    return -MAX_FLOAT32 <= value <= MAX_FLOAT32


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object from a file. Raises CheckpointError if it is missing or not an object.

    Numbers must fit float32; `NaN` and `Infinity` are accepted.
    """
    try:
        size = size_of_file(path)
        if size > max_bytes:
            raise CheckpointError(
                str(path), f"has {size} bytes, the limit is {max_bytes}", "download it again"
            )
        text = path.read_text(encoding="utf-8")
        value = json.loads(text, parse_int=parse_int, parse_float=_parse_float)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate: ValueError
    except FileNotFoundError:
        raise CheckpointError(str(path), "not found", "give a folder that has this file") from None
    except OSError as error:
        raise CheckpointError(
            str(path), f"cannot be read: {error.strerror}", CHECK_ACCESS
        ) from None
    except _BeyondFloat32 as error:
        raise CheckpointError(
            str(path), str(error), "copy the file from the original model"
        ) from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(str(path), f"is not valid JSON: {error}", DOWNLOAD_AGAIN) from None
    if not isinstance(value, dict):
        raise CheckpointError(
            str(path), f"expected a JSON object, found {type(value).__name__}", DOWNLOAD_AGAIN
        )
    return value


class _BeyondFloat32(ValueError):
    """A number in a JSON file exceeds float32."""


def parse_int(text: str) -> int:
    # 39 digits are enough for every float32; int() of a very long number is slow.
    if len(text) > 40 or not fits_float32(value := int(text)):
        raise _BeyondFloat32(f"expected numbers within float32, found one of {len(text)} digits")
    return value


def _parse_float(text: str) -> float:
    value = float(text)
    if not fits_float32(value):
        raise _BeyondFloat32(f"expected numbers within float32, found {text:.40}")
    return value


def size_of_file(path: Path) -> int:
    """Return the size of a regular file; a pipe or a device could be endless."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(str(path), "is not a regular file", "replace it with a file")
    return status.st_size
