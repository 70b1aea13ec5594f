"""Errors of the response store: the log for the operator, and the reply to the client."""

import logging
import sqlite3

from qserve.server.http.errors import ApiError

# Retrying does not help until the operator acts.
NO_RETRY = {"x-should-retry": "false"}

logger = logging.getLogger(__name__)


class StoreError(ApiError):
    """The response store cannot serve a request."""


def as_store_error(error: sqlite3.Error, path: str) -> StoreError:
    """Convert an error of SQLite. The log names the file; the client does not see its path."""
    name = getattr(error, "sqlite_errorname", None) or type(error).__name__
    logger.error("The response store %s failed: %s (%s)", path, error, name)
    if name.startswith("SQLITE_FULL"):
        return StoreError(
            507,
            "The response store is full: its disk has no space left.",
            "Send the whole conversation with store: false; the operator has to free space.",
            headers=NO_RETRY,
        )
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return StoreError(
            500,
            "The response store is damaged.",
            "Send the whole conversation as input, with store: false; the operator has to move the"
            " damaged file away and restart the server.",
            headers=NO_RETRY,
        )
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return StoreError(503, "The response store is busy.", "Try again later.")
    return StoreError(
        500, "The response store cannot be used.", "See the server's log.", headers=NO_RETRY
    )


def not_found(kind: str, name: str, param: str | None = None) -> ApiError:
    """Return the error for an id that this client has not stored."""
    return ApiError(
        404,
        f"The {kind} {name[:100]!r} does not exist, or has expired.",
        "Check the id, or send the content itself.",
        param,
    )
