"""Reader of data files: a JSON array, a JSON object that contains one, or JSON Lines.

A file's type is decided by its content, or by its name if the content is broken. Needs no torch.
"""

import gzip
import io
import json
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from formats.errors import CHECK_ACCESS, InputError

JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
# Tables, which would otherwise be read as plain text.
_TABLES = (".csv", ".tsv")
_GZIP_MAGIC = b"\x1f\x8b"
MAX_FILE_BYTES = 2**30  # also applies to the decompressed content
_SPACE = re.compile(r"[ \t\r\n]*")
_BEGINS_LIKE_JSON = re.compile(r'\s*(?:\[\s*)?\{\s*"|\s*\[\s*"')


def check_is_file(path: Path) -> None:
    """Raise InputError unless a path is a regular file of at most MAX_FILE_BYTES.

    A pipe or a device may have no end.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise InputError(str(path), error.strerror or "cannot be read", CHECK_ACCESS) from None
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        problem = "is a pipe or a device, which may be endless"
        raise InputError(str(path), problem, "save the text as a file")
    _check_size(path, status.st_size)


def _check_size(path: Path, num_bytes: int) -> None:
    if num_bytes > MAX_FILE_BYTES:
        problem = f"has more than {MAX_FILE_BYTES >> 20} MiB, which is the limit"
        raise InputError(str(path), problem, "give a part of it")


def read_text(path: Path) -> str:
    """Return the content of a UTF-8 file, gzip-compressed or not, without a byte order mark.

    Raises InputError if the file is unreadable, a pipe, too large, not UTF-8, or a table.
    """
    if path.suffix.lower() in _TABLES:
        raise InputError(str(path), "tables are not supported", "give JSON Lines or parquet")
    check_is_file(path)
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP_MAGIC):
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
                content = file.read(MAX_FILE_BYTES + 1)
            _check_size(path, len(content))
        return content.decode("utf-8-sig")
    except (OSError, EOFError) as error:
        problem = getattr(error, "strerror", None) or f"cannot be read: {error}"
        raise InputError(str(path), problem, CHECK_ACCESS) from None
    except UnicodeDecodeError as error:
        raise InputError(
            str(path), f"is not UTF-8 text: {error.reason}", "save the file in UTF-8"
        ) from None


def holds_json(path: Path, content: str) -> bool:
    """Return True for JSON, by the file's name (without .gz) or by its first characters."""
    stem = Path(path.stem) if path.suffix.lower() == ".gz" else path
    return stem.suffix.lower() in JSON_SUFFIXES or bool(_BEGINS_LIKE_JSON.match(content))


def json_rows(
    content: str, subject: str, fields: tuple[str, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield each row and its location: `subject` and the line (JSON Lines) or index (array).

    If the content is one object, it is a row if one of its `fields` is not a list of texts.
    Otherwise it must hold exactly one list of objects or texts, whose items are the rows. Raises
    InputError, with the line, if the content is not JSON.
    """
    values = list(_values(content, subject))
    if len(values) == 1:
        _, value = values[0]
        if isinstance(value, dict) and not any(_is_field(value.get(f)) for f in fields):
            lists = [item for item in value.values() if _is_list_of_rows(item)]
            value = lists[0] if len(lists) == 1 else value
        if isinstance(value, list):
            for number, row in enumerate(value, 1):
                yield f"{subject} row {number}", row
            return
    for line, value in values:
        yield f"{subject} line {line}", value


def _is_field(value: Any) -> bool:
    """Return True for a value of one row: a text or a chat, not a column of texts."""
    return value is not None and not (
        isinstance(value, list) and value and all(isinstance(item, str) for item in value)
    )


def _is_list_of_rows(value: Any) -> bool:
    is_list = isinstance(value, list) and len(value) > 0
    return is_list and all(isinstance(item, dict | str) for item in value)


def _values(content: str, subject: str) -> Iterator[tuple[int, Any]]:
    """Yield consecutive JSON values, each with the line on which it begins."""
    decode = json.JSONDecoder().raw_decode
    position, line, counted = 0, 1, 0
    while (position := _SPACE.match(content, position).end()) < len(content):
        line += content.count("\n", counted, position)
        counted = position
        try:
            value, position = decode(content, position)
        except (ValueError, RecursionError) as error:
            problem = "is not JSON: it is nested too deeply"
            if isinstance(error, json.JSONDecodeError):
                problem = f"is not JSON: {error.msg} at line {error.lineno} column {error.colno}"
            raise InputError(
                f"{subject} line {line}", problem, 'expected objects such as {"text": "..."}'
            ) from None
        yield line, value
