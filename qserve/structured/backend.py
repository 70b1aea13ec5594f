"""llguidance, imported on first use: an engine without grammars runs without it."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from formats.errors import InputError, one_line

# Cost limits of one grammar. They exceed the library's defaults only where real schemas need it:
# 500 optional properties give 2,007 items in a row.
MAX_ITEMS_IN_ROW = 20_000
MAX_LEXER_STATES = 50_000  # 1 to 2 kB each


def library() -> ModuleType:
    """Return the package. Raises InputError if it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise InputError(
            "structured output", "requires the package llguidance", "pip install llguidance"
        ) from error
    return llguidance


def limits() -> object:
    """Limits for the library's parser and lexer."""
    return library().LLParserLimits(
        max_items_in_row=MAX_ITEMS_IN_ROW,
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,
    )


class LibraryError(Exception):
    """The library panicked; Python does not see a panic as an Exception."""


def call(work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call the library. Raises its errors, and LibraryError for a panic."""
    try:
        return work(*arguments, **options)
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise LibraryError(one_line(error)) from None
