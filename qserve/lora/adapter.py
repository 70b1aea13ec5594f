"""Adapter: an adapter that the engine knows, and its matrices while they are on the host."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Event
from typing import Any


@dataclass(slots=True, kw_only=True, eq=False)
class Adapter:
    """An adapter and its name. Loading another folder under this name makes another Adapter."""

    name: str
    path: str
    # Digest of all weights, which is part of the page keys of its requests. So pages are shared
    # only between requests with the same adapter weights.
    generation: str = ""
    packed: Any = None  # SharedAdapter; None: not on the host
    number: int = 0  # lora_int_id of the request that loaded it, which counts the server's loads
    reading: Future | None = None  # its result is `packed`
    has_left: Event = field(default_factory=Event)  # set when no request waits for `reading`
    last_used: int = 0  # in ticks of AdapterTable's clock
