"""Default calibration texts: excerpts drawn so that few windows have the mixture of the whole set.

The texts are of several kinds (prose, code, ...), and each kind is of several sources. Any number
of windows has the same proportions of kinds, and of sources within a kind. For example, even a few
windows of code are in several programming languages.
"""

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from calibrate.texts.evaluate import CHARS_PER_TOKEN, Excerpt
from calibrate.texts.excerpts import pieces, render
from formats.errors import InputError

DEFAULT_TEXTS = Path(__file__).parent / "texts.jsonl"
MIN_EXCERPTS = 32  # excerpts that a run reads, or more


def excerpt_chars(samples: int, sequence_length: int) -> int:
    """Characters of an excerpt: about a window, or less if the windows would have few excerpts."""
    num_tokens = min(sequence_length, samples * sequence_length // MIN_EXCERPTS)
    return CHARS_PER_TOKEN * max(1, num_tokens)


def default_excerpts(tokenizer: Any, num_chars: int, seed: int) -> list[Excerpt]:
    """Return all excerpts of the default texts, with rendered chats, in the order of reading.

    The seed decides the order of the texts of a source, and of a text's excerpts.
    """
    draw = random.Random(seed)
    lines = DEFAULT_TEXTS.read_text(encoding="utf-8").splitlines()
    kinds: dict[str, dict[str, list[list[Excerpt]]]] = {}
    for row in map(json.loads, lines):
        found = pieces(_text(row, tokenizer), num_chars)
        draw.shuffle(found)
        kinds.setdefault(row["kind"], {}).setdefault(row["source"], []).append(found)
    for sources in kinds.values():
        for texts in sources.values():
            draw.shuffle(texts)
    return _spread(
        _spread(_in_turn(texts) for texts in sources.values()) for sources in kinds.values()
    )


def endless_excerpts(tokenizer: Any, num_chars: int, seed: int) -> Iterator[Excerpt]:
    """Yield the excerpts of the default texts again and again."""
    while True:
        yield from default_excerpts(tokenizer, num_chars, seed)


def _text(row: dict[str, Any], tokenizer: Any) -> str:
    """Return a row's text, or its chat in the model's template.

    A chat is plain text for a model without a chat template, or with one that rejects it.
    """
    if "text" in row:
        return row["text"]
    try:
        return render(row["messages"], tokenizer)
    except InputError:
        turns = (f"{each['role'].title()}: {each['content']}" for each in row["messages"])
        return "\n\n".join(turns) + "\n"


def _in_turn(texts: list[list[Excerpt]]) -> list[Excerpt]:
    """Return one excerpt of each text, then a second one of each, and so on."""
    longest = max(map(len, texts))
    return [each[turn] for turn in range(longest) for each in texts if turn < len(each)]


def _spread(lists: Iterable[list[Excerpt]]) -> list[Excerpt]:
    """Merge lists so that each has its share of the characters of any beginning.

    An excerpt is placed by the relative position of its middle in its own list: the excerpt in the
    middle of one list comes after half of every other list.
    """
    placed = []
    for excerpts in lists:
        total, before = sum(len(each.text) for each in excerpts), 0
        for excerpt in excerpts:
            placed.append(((before + len(excerpt.text) / 2) / max(1, total), excerpt))
            before += len(excerpt.text)
    return [excerpt for _, excerpt in sorted(placed, key=lambda place: place[0])]
