"""How long an answer may take: the server's limit, and the client's if that is less."""

import math
from collections.abc import Mapping

from qserve.server.errors import ApiError

HEADER = "x-request-timeout"


def seconds(headers: Mapping[str, str], limit: float | None) -> float | None:
    """The seconds that a request has; None: as long as it takes. Raises ApiError(400)."""
    text = headers.get(HEADER)
    if text is None:
        return limit
    try:
        asked = float(text)
    except ValueError:
        asked = math.nan
    if not 0 < asked < math.inf:
        raise ApiError(400, f"{HEADER}: expected seconds, found {text[:100]!r}.", HEADER)
    return asked if limit is None else min(asked, limit)
