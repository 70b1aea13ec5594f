"""Plain text tables and sizes, for reports and flags."""

import re
from collections import Counter
from collections.abc import Collection, Sequence

from formats.errors import InputError

MAX_NAMES = 8  # names that a summary lists one by one
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table: the first column left-aligned, the others right-aligned."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def names_text(names: Collection[str]) -> str:
    """Format names of tensors or modules in one line; many names are grouped by kind.

    ["a.0.b", "a.1.b", ...] -> "a.*.b (12)"; kinds beyond MAX_NAMES are counted.
    """
    if len(names) <= MAX_NAMES:
        return ", ".join(names)
    kinds = Counter(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names).most_common()
    shown = ", ".join(f"{kind} ({count})" for kind, count in kinds[:MAX_NAMES])
    rest = sum(count for _, count in kinds[MAX_NAMES:])
    return shown + f" and {rest} more" * (rest > 0)


def count_text(count: int, noun: str) -> str:
    """Format a number with its noun: "1 window", "2 windows"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def size_text(num_bytes: int) -> str:
    """Format bytes in decimal units: 10494472 -> "10.5 MB"."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def parse_size(text: str) -> int:
    """Parse bytes from "500MB", "2GB", "1GiB" or "1000". Raises InputError."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,3})?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].upper() not in UNITS or not float(found[1]):
        raise InputError(f"size {text!r}", "is not a number of bytes", "write it as 500MB or 2GB")
    return int(float(found[1]) * UNITS[found[2].upper()])
