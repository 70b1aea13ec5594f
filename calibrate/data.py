"""Calibration data: texts of any source to full windows of token ids. Knows no model.

Texts are shuffled by the seed, each preceded by BOS, joined, and cut into windows without a rest:
the same source, tokenizer and seed give the same ids, whose hash the report records.
"""

import hashlib
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from calibrate.evaluate import check_text, make_windows, read_file, read_rows
from formats.errors import InputError, one_line

DEFAULT_SAMPLES = 128
DEFAULT_LENGTH = 2048
SHIPPED_TEXTS = Path(__file__).parent / "texts.jsonl"
MAX_DATASET_ROWS = 20_000  # of a data set by name; enough for any number of windows in use
TEXT_SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationData:
    """Windows of token ids and where they came from."""

    ids_WS: torch.Tensor  # int64
    source: str
    seed: int
    warnings: tuple[str, ...] = ()

    @property
    def sha256(self) -> str:
        """Of the ids as little-endian int64, and of their shape."""
        digest = hashlib.sha256(json.dumps(list(self.ids_WS.shape)).encode())
        digest.update(self.ids_WS.contiguous().numpy().astype("<i8").tobytes())
        return digest.hexdigest()


def read_calibration(
    source: str | None,
    tokenizer: Any,
    *,
    samples: int = DEFAULT_SAMPLES,
    sequence_length: int = DEFAULT_LENGTH,
    seed: int = 0,
) -> CalibrationData:
    """Windows from a file, or from a data set by name; None: the texts shipped with the package.

    Raises InputError where the source cannot be read or does not fill one window.
    """
    warnings = []
    if source is None:
        warnings.append(
            "calibrated on the small text set that the package brings: texts like those the model"
            " will see are better (--calibration FILE)"
        )
    documents = read_documents(source or str(SHIPPED_TEXTS))
    random.Random(seed).shuffle(documents)
    ids_WS = make_windows(
        (render(document, tokenizer) for document in documents),
        lambda text: tokenizer.encode(text, add_special_tokens=False, verbose=False),
        tokenizer.bos_token_id,
        sequence_length,
        samples,
        source="shipped texts" if source is None else source,
    )
    if len(ids_WS) < samples:
        warnings.append(f"the calibration data fills {len(ids_WS)} windows, not {samples}")
    return CalibrationData(
        ids_WS=ids_WS,
        source="shipped texts" if source is None else source,
        seed=seed,
        warnings=tuple(warnings),
    )


def read_documents(source: str) -> list[Any]:
    """Texts, or chats as lists of messages, of a file or of a data set by name or folder."""
    path = Path(source)
    if not path.exists() and (path.suffix in TEXT_SUFFIXES or source.startswith((".", "/"))):
        raise InputError(source, "not found", "give a text, .jsonl or .parquet file")
    if path.is_dir() or not path.exists():
        return _from_datasets(source, path=source)
    if path.suffix == ".parquet":
        return _from_datasets(source, path="parquet", data_files=source)
    if path.suffix != ".jsonl":
        return [read_file(path)]
    return [_document(row, where) for where, row in read_rows(path)]


def _document(row: Any, where: str) -> Any:
    """A row's text or messages."""
    row = row if isinstance(row, dict) else {}
    text, messages = row.get("text"), row.get("messages")
    if isinstance(text, str):
        return check_text(text, where)
    if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
        check_text(json.dumps(messages, ensure_ascii=False, default=str), where)
        return messages
    raise InputError(where, 'expected an object with a string "text" or a list of "messages"')


def _from_datasets(source: str, **arguments: Any) -> list[Any]:
    try:
        import datasets
    except ImportError:
        raise InputError(
            source,
            "is no text file, and parquet files and data sets by name need the package datasets",
            "pip install datasets, or give a text or .jsonl file",
        ) from None
    try:
        # streaming: no copy of the data in the package's cache
        rows: Iterable[Any] = datasets.load_dataset(**arguments, split="train", streaming=True)
        documents = []
        for number, row in enumerate(rows):
            if number == MAX_DATASET_ROWS:
                break
            documents.append(_document(row, f"{source} row {number}"))
    except InputError:
        raise
    except Exception as error:  # datasets raises what its readers and its hub client raise
        raise InputError(source, f"cannot be read by datasets: {one_line(error)}") from None
    return documents


def render(document: Any, tokenizer: Any) -> str:
    """A text, or a chat by the model's template. Raises InputError."""
    if isinstance(document, str):
        return document
    if not tokenizer.chat_template:
        raise InputError(
            "calibration data",
            "has chat messages, but the model has no chat template",
            'use "text"',
        )
    try:
        text = tokenizer.apply_chat_template(document, tokenize=False)
    except Exception as error:  # whatever the template raises on a message that it cannot take
        raise InputError(
            "calibration data", f"the chat template refuses it: {one_line(error)}"
        ) from None
    # The template writes BOS itself; every text gets one.
    bos = tokenizer.bos_token or ""
    return text.removeprefix(bos) if bos else text
