"""Errors for flags that a command does not have."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like a misspelt one, if any is."""
    words = {each.lstrip("-"): each for each in known}
    found = difflib.get_close_matches(name.lstrip("-"), list(words), 1)
    return words[found[0]] if found else None


def unknown_arguments(arguments: list[str], known: Iterable[str]) -> str:
    """Return the problem and its remedy; `arguments`: those that a command has no meaning for."""
    first = arguments[0].partition("=")[0]
    if not first.startswith("-"):
        return f"unexpected argument {first!r}"
    like = nearest(first, known)
    return f"{first}: unknown flag" + ("" if like is None else f"; did you mean {like}?")
