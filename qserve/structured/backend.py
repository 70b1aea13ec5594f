"""llguidance, imported when it is first needed: an engine without grammars runs without it."""

from types import ModuleType

from formats.errors import InputError

# What one grammar may cost. Beyond the library's defaults only where real schemas need it: 500
# optional properties make 2,007 items in a row.
MAX_ITEMS_IN_ROW = 20_000
MAX_LEXER_STATES = 50_000  # 1 to 2 kB each


def library() -> ModuleType:
    """The package. Raises InputError where it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise InputError(
            "structured output", "needs the package llguidance", "pip install llguidance"
        ) from error
    return llguidance


def limits() -> object:
    """The limits of the library's parser and lexer."""
    return library().LLParserLimits(
        max_items_in_row=MAX_ITEMS_IN_ROW,
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,
    )
