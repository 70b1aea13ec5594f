"""Markers in model output: a pattern of them, and the search in text that arrives in pieces."""

import re
from collections.abc import Iterable

# Texts that are usually one token in a tokenizer.
TOKEN = re.compile(r'<\|"\|>|\]<\]minimax\[>\[|<[^<>\s]+>|\[/?[A-Z_]+\]|｜DSML｜')
MARKED = re.compile(f"({TOKEN.pattern})")


def first_marker(text: str, markers: Iterable[str], start: int = 0) -> tuple[int, str] | None:
    """Return the position of the first marker in a text, and the marker."""
    found = ((text.find(marker, start), marker) for marker in markers)
    return min((each for each in found if each[0] >= 0), default=None)


def num_held(text: str, markers: Iterable[str]) -> int:
    """Return the number of characters at the end of a text that may start a marker."""
    return max((_num_held(text, marker) for marker in markers), default=0)


def _num_held(text: str, marker: str) -> int:
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0:
        if marker.startswith(text[at:]):
            return len(text) - at
        at = text.find(marker[0], at + 1)
    return 0
