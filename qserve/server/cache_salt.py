"""The salt of a request's KV pages: the client's own, and its API key's where that is asked for."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from qserve.handling import Handling


def salted_by_key(handling: Handling, headers: Mapping[str, str]) -> Handling:
    """`handling` for requests with one API key alone, whatever salt they state."""
    key = headers.get("authorization", "")
    parts = f"{len(key)}:{key}{handling.cache_salt}"
    # A digest: the key itself goes nowhere, and no two pairs make one text.
    return replace(handling, cache_salt=hashlib.sha256(parts.encode()).hexdigest())
