"""Traces of requests: reads arrival times and lengths from published files. Loads no torch.

The formats are BurstGPT's and Azure's CSV, Mooncake's JSON lines (timestamp in milliseconds,
input_length, output_length, hash_ids), Vidur's CSV, and a detailed result of `bench serve`. If it
is not stated, the first line determines it.
"""

import csv
import datetime
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from formats.errors import InputError

MOONCAKE_BLOCK = 512  # prompt tokens per entry of hash_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One request of a trace."""

    arrival: float  # in seconds
    input_len: int  # in tokens
    output_len: int  # in tokens
    # an id for each block of the prompt: prompts whose first ids are equal share these blocks
    hash_ids: tuple[int, ...] = ()


def read_trace(path: str, most: int | None = None, kind: str | None = None) -> list[TraceRow]:
    """Read the first `most` requests of a file, ordered by arrival. Raises InputError.

    The first one arrives at 0. `kind`: key of FORMATS; None: detect it from the first line.
    """
    text_path = Path(path)
    if not text_path.is_file():
        raise InputError(path, "no such file", "give a trace file")
    with text_path.open(encoding="utf-8-sig", newline="") as file:
        head = file.readline()
        file.seek(0)
        reader = FORMATS[kind] if kind is not None else _reader_of(path, head)
        rows = []
        try:
            for row in reader(file):
                rows.append(row)
                if most is not None and len(rows) >= most:
                    break
        except (KeyError, ValueError, TypeError) as error:
            raise InputError(
                path,
                f"request {len(rows) + 1} cannot be read: {type(error).__name__}: {error}",
                "remove the line, or repair it",
            ) from None
    if not rows:
        raise InputError(path, "contains no request", "give a trace with one JSON object a line")
    rows.sort(key=lambda row: row.arrival)
    start = rows[0].arrival
    return [
        TraceRow(
            arrival=row.arrival - start,
            input_len=row.input_len,
            output_len=row.output_len,
            hash_ids=row.hash_ids,
        )
        for row in rows
    ]


def _reader_of(path: str, head: str) -> Callable[[Iterator[str]], Iterator[TraceRow]]:
    for field, reader in BY_FIELD:
        if field in head:
            return reader
    raise InputError(
        path,
        f"expected a trace with one of {', '.join(field for field, _ in BY_FIELD)} in its first"
        f" line, found {head[:80]!r}",
        "convert the trace to one of these forms",
    )


def _burstgpt(lines: Iterator[str]) -> Iterator[TraceRow]:
    """Yield the requests to GPT-4 that did not fail, as vLLM does."""
    for row in csv.DictReader(lines):
        if row["Model"] == "GPT-4" and int(row["Response tokens"]) > 0:
            yield TraceRow(
                arrival=float(row["Timestamp"]),
                input_len=max(1, int(row["Request tokens"])),
                output_len=int(row["Response tokens"]),
            )


def _azure(lines: Iterator[str]) -> Iterator[TraceRow]:
    for row in csv.DictReader(lines):
        stamp = row["TIMESTAMP"].strip()
        whole, _, fraction = stamp.partition(".")
        digits = fraction.partition("+")[0]
        moment = datetime.datetime.fromisoformat(whole.partition("+")[0])
        seconds = moment.replace(tzinfo=datetime.UTC).timestamp()
        yield TraceRow(
            arrival=seconds + (float(f"0.{digits}") if digits else 0.0),
            input_len=max(1, int(row["ContextTokens"])),
            output_len=max(1, int(row["GeneratedTokens"])),
        )


def _mooncake(lines: Iterator[str]) -> Iterator[TraceRow]:
    for line in lines:
        if line.strip():
            row = json.loads(line)
            yield TraceRow(
                arrival=row["timestamp"] / 1000,
                input_len=max(1, int(row["input_length"])),
                output_len=max(1, int(row["output_length"])),
                hash_ids=tuple(row.get("hash_ids") or ()),
            )


def _vidur(lines: Iterator[str]) -> Iterator[TraceRow]:
    for row in csv.DictReader(lines):
        yield TraceRow(
            arrival=float(row["arrived_at"]),
            input_len=max(1, int(row["num_prefill_tokens"])),
            output_len=max(1, int(row["num_decode_tokens"])),
        )


def _result(lines: Iterator[str]) -> Iterator[TraceRow]:
    """Yield the successful requests of a detailed result of `bench serve`."""
    content = json.loads("".join(lines))
    requests = zip(
        content["start_times"],
        content["input_lens"],
        content["output_lens"],
        content["errors"],
        strict=True,
    )
    for start, input_len, output_len, error in requests:
        if not error:
            yield TraceRow(arrival=start, input_len=input_len, output_len=max(1, output_len))


FORMATS = {
    "burstgpt": _burstgpt,
    "azure": _azure,
    "timed_trace": _mooncake,
    "vidur": _vidur,
    "result": _result,
}
# (text in the first line, reader); the first match counts
BY_FIELD = (
    ("Response tokens", _burstgpt),
    ("ContextTokens", _azure),
    ("input_length", _mooncake),
    ("num_prefill_tokens", _vidur),
    ("{", _result),
)
