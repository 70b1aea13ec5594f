"""Read texts and chats from a file or a data set.

A document is a text, or a chat as a list of messages. JSON, JSON Lines and parquet are recognized
by content or name; any other file is one text.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from formats.errors import InputError, one_line
from formats.files.json_rows import JSON_SUFFIXES, check_is_file, holds_json, json_rows, read_text

MAX_DATASET_ROWS = 20_000  # rows read from a data set; enough for any usual number of windows
FILE_SUFFIXES = (".txt", ".md", ".parquet", ".gz", *JSON_SUFFIXES)
PARQUET, PARQUET_MAGIC = ".parquet", b"PAR1"
FIELDS = ("text", "messages")
SPLIT = "train"


def read_documents(source: str) -> list[Any]:
    """Read the documents of a file, or of a data set by name or folder. Raises InputError."""
    path = Path(source)
    looks_like_file = path.suffix.lower() in FILE_SUFFIXES or source.startswith((".", "/"))
    if not path.exists() and looks_like_file:
        raise InputError(source, "not found", "use a text, JSON, JSON Lines or parquet file")
    if path.is_dir() or not path.exists():
        return [document for _, document in _from_datasets(source, path=source)]
    return [document for _, document in _documents_of(path)]


def read_file(path: str | Path) -> list[Any]:
    """Read the documents of a file. Raises InputError."""
    return [document for _, document in _documents_of(Path(path))]


def read_texts(path: str | Path) -> list[str]:
    """Read the texts of a file. Raises InputError, naming the row, if one is a chat."""
    texts = []
    for where, document in _documents_of(Path(path)):
        if not isinstance(document, str):
            raise InputError(
                where,
                'expected a JSON object with a string "text", found a chat',
                "render chats as texts; chats without images are only data of --calibration",
            )
        texts.append(document)
    return texts


def _documents_of(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (position for error messages, document) for each document of a file."""
    if _is_parquet(path):
        yield from _from_datasets(str(path), path="parquet", data_files=str(path))
        return
    content = read_text(path)
    if not holds_json(path, content):
        yield str(path), content
        return
    for where, row in json_rows(content, str(path), FIELDS):
        yield where, _document(row, where)


def _is_parquet(path: Path) -> bool:
    if path.suffix.lower() == PARQUET:
        return True
    check_is_file(path)
    try:
        with path.open("rb") as file:
            return file.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC
    except OSError as error:
        raise InputError(
            str(path), f"cannot be read: {one_line(error)}", "check the path and its permissions"
        ) from None


def _document(row: Any, where: str) -> Any:
    """Return the text or the messages of a row. Raises InputError if it has neither."""
    text = row if isinstance(row, str) else None
    keys = row if isinstance(row, dict) else {}
    text, messages = keys.get("text", text), keys.get("messages")
    if isinstance(text, str):
        return _checked(text, text, where)
    if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
        written = json.dumps(messages, ensure_ascii=False, default=str)
        return _checked(messages, written, where)
    found = f"an object with {', '.join(map(repr, list(keys)[:6]))}" if keys else repr(row)[:60]
    for key in ("text", "messages"):
        if key in keys:
            found = f"{key!r}: {keys[key]!r:.60}"
    raise InputError(
        where,
        f'expected an object with a string "text" or a list of "messages", found {found}',
        "rename the column of the texts to text",
    )


def _checked(document: Any, written: str, where: str) -> Any:
    """Return the document. Raises InputError if it has a lone surrogate, which JSON can express."""
    try:
        written.encode()
    except UnicodeEncodeError:
        raise InputError(
            where,
            "contains a lone surrogate (half a character), which tokenizers reject",
            "remove it",
        ) from None
    return document


def _from_datasets(source: str, **arguments: Any) -> list[tuple[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise InputError(
            source,
            "is not a text file, and parquet files and data sets by name require the "
            "package datasets",
            "pip install datasets, or use a text or .jsonl file",
        ) from None
    try:
        saved = _saved_folder(Path(source))
        if saved is not None:
            rows: Iterable[Any] = datasets.load_from_disk(str(saved))
        else:
            # Streaming keeps no copy of the data in the package's cache.
            rows = datasets.load_dataset(**arguments, split=SPLIT, streaming=True)
        documents = []
        for number, row in enumerate(rows):
            if number == MAX_DATASET_ROWS:
                break
            where = f"{source} row {number}"
            documents.append((where, _document(row, where)))
    except InputError:
        raise
    except Exception as error:  # datasets raises any exception of its readers and its hub client
        raise InputError(
            source,
            f"cannot be read by datasets: {one_line(error)}",
            "check the name, or use a text, JSON, JSON Lines or parquet file",
        ) from None
    return documents


def _saved_folder(folder: Path) -> Path | None:
    """Return the folder of a data set that `save_to_disk` wrote, or of its split train."""
    folders = [folder, folder / SPLIT] if (folder / "dataset_dict.json").exists() else [folder]
    return next((each for each in folders if (each / "state.json").exists()), None)
