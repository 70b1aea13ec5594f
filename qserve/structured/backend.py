"""Access to llguidance. It is imported on first use, so engines without grammars do not need it."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from formats.errors import InputError, one_line

# Limits on the cost of one grammar. They exceed llguidance's defaults only as far as real schemas
# need: a schema with 500 optional properties has 2,007 items in a row.
MAX_ITEMS_IN_ROW = 20_000
MAX_LEXER_STATES = 50_000  # a state takes 1 to 2 kB


def library() -> ModuleType:
    """Return the module llguidance. Raises InputError if it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise InputError(
            "structured output", "requires the package llguidance", "pip install llguidance"
        ) from error
    return llguidance


def limits() -> object:
    """Return the limits for llguidance's parser and lexer."""
    return library().LLParserLimits(
        max_items_in_row=MAX_ITEMS_IN_ROW,
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,
    )


class LibraryError(Exception):
    """llguidance panicked. In Python, a panic is not an Exception."""


def call(work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function of llguidance. Raises its errors, and LibraryError for a panic."""
    try:
        return work(*arguments, **options)
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise LibraryError(one_line(error)) from None
