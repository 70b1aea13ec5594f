"""Adapter: a known adapter, and its matrices while the host holds them."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Event
from typing import Any


@dataclass(slots=True, kw_only=True, eq=False)
class Adapter:
    """A name and its current adapter. Another folder under the same name is another Adapter."""

    name: str
    path: str
    # Part of the page keys of its requests: a digest of all weights. A folder with new weights is
    # another generation; pages of equal weights are found again.
    generation: str = ""
    packed: Any = None  # SharedAdapter; None: the host does not hold it
    number: int = 0  # of the LoRARequest by which a server loaded it: a count of loads
    reading: Future | None = None  # resolves to `packed`
    has_left: Event = field(default_factory=Event)  # set: no request waits for `reading`
    last_used: int = 0  # by the clock of AdapterTable
