"""Errors for keywords that a class of parameters does not have."""

import difflib
import functools
from dataclasses import fields
from typing import Any, TypeVar

from qserve.errors import ParameterError

Parameters = TypeVar("Parameters")


def names_unknown_fields(cls: type[Parameters]) -> type[Parameters]:
    """Make a dataclass raise ParameterError, with the nearest field, for an unknown keyword.

    A decorator. Python's TypeError for such a keyword does not name a remedy.
    """
    init, known = cls.__init__, [each.name for each in fields(cls)]

    @functools.wraps(init)
    def checked(self: Parameters, *positional: Any, **given: Any) -> None:
        try:
            init(self, *positional, **given)
        except TypeError:
            unknown = next((name for name in given if name not in known), None)
            if unknown is None:
                raise
            near = difflib.get_close_matches(unknown, known, 1)
            raise ParameterError(
                unknown,
                f"is not a field of {cls.__name__}",
                f"did you mean {near[0]}?" if near else f"its fields: {', '.join(known)}",
            ) from None

    cls.__init__ = checked
    return cls
