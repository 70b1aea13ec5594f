"""A setting: a dataclass field that is also a command-line flag. Loads no torch."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, field, fields
from numbers import Real
from typing import Any

from formats.errors import InputError
from qserve.errors import LEAVE_OUT

NUMBERS = (int, float, int | None, float | None)  # types of settings that are numbers
REQUIRED = MISSING  # as a setting's default: the flag is required


def setting(
    default: Any,
    help: str,
    choices: tuple[str | int, ...] | None = None,
    *,
    positional: bool = False,
    many: bool = False,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    aliases: Mapping[str, str | None] | None = None,
) -> Any:
    """Declare a dataclass field that is also a command-line flag, or a positional argument.

    A list field is a flag that may be repeated; with `many`, one flag takes several values. `low`
    and `high`: bounds of a number, inclusive; `above`: a lower bound, exclusive. `aliases`: other
    names of choices, or texts for a number; None means the default.
    """
    metadata = {"help": help, "choices": choices, "positional": positional, "many": many}
    metadata |= {"low": low, "high": high, "above": above, "aliases": aliases or {}}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def check_settings(config: object) -> None:
    """Replace aliases; raise InputError for a setting outside of its choices or range."""
    for each in fields(config):
        value, allowed = getattr(config, each.name), each.metadata
        flag = f"--{each.name.replace('_', '-')}"
        if value is None or not allowed:
            continue
        if isinstance(value, str | int) and str(value) in allowed["aliases"]:
            value = allowed["aliases"][str(value)]
            object.__setattr__(config, each.name, value)  # settings classes are frozen
            if value is None:
                continue
        if allowed["choices"] is not None and value not in allowed["choices"]:
            raise InputError(
                flag,
                f"expected one of {', '.join(map(str, allowed['choices']))}, found {value!r}",
                LEAVE_OUT,
            )
        if each.type in NUMBERS and (isinstance(value, bool) or not isinstance(value, Real)):
            raise InputError(flag, f"expected a number, found {value!r:.80}", LEAVE_OUT)
        low, high = allowed["low"], allowed["high"]
        if low is not None and not low <= value <= (math.inf if high is None else high):
            expected = f"{low} or more" if high is None else f"{low} to {high}"
            raise InputError(flag, f"expected {expected}, found {value}", LEAVE_OUT)
        if allowed.get("above") is not None and not value > allowed["above"]:
            raise InputError(
                flag, f"expected more than {allowed['above']}, found {value}", LEAVE_OUT
            )


def check_key(source: str, key: str) -> None:
    """Raise InputError for an API key that no client can send. The error does not show the key."""
    # HTTP strips white space at the ends of a header.
    if not key or key != key.strip():
        raise InputError(
            source, "expected a key without white space at its ends", "remove the white space"
        )
    # Undecodable bytes of an argument or a variable are surrogates.
    if any(
        (each < " " and each != "\t") or each == "\x7f" or "\ud800" <= each <= "\udfff"
        for each in key
    ):
        raise InputError(
            source, "has a key with control characters or bytes that are not UTF-8", "correct it"
        )
