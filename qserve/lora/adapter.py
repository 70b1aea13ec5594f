"""Adapter: one that the engine knows, and its matrices while the host has them. Loads no torch."""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, kw_only=True, eq=False)
class Adapter:
    """A name and what stands for it now. Another folder under the same name is another Adapter."""

    name: str
    path: str
    # What the keys and values of its requests depend on: a digest of all numbers. The same folder
    # with other numbers is another generation; pages of the same numbers are found again.
    generation: str = ""
    packed: Any = None  # SharedAdapter; None: the host does not have it, or not yet
    number: int = 0  # of the LoRARequest by which a server loaded it, which counts its loads
    reading: Future | None = None  # what becomes `packed`
    last_used: int = 0  # by the clock of AdapterTable
