"""Pause: requests that wait while generation is paused, and what happens to those that run."""

from formats.errors import InputError
from qserve.engine.control.commands import ABORT, KEEP, MODES
from qserve.engine.request import Request


def check_mode(mode: str) -> None:
    """Raise InputError for an unknown mode."""
    if mode not in MODES:
        raise InputError("mode", f"expected one of {', '.join(MODES)}, found {mode!r:.40}")


class Pause:
    """State of one engine: running, or paused in a mode. Later requests are held, in order."""

    def __init__(self) -> None:
        self.mode: str | None = None  # None: generation is not paused
        self._held: dict[str, Request] = {}

    def __len__(self) -> int:
        """Number of held requests."""
        return len(self._held)

    @property
    def is_on(self) -> bool:
        return self.mode is not None

    @property
    def stops_steps(self) -> bool:
        """True if no step may be launched, even for requests that have begun."""
        return self.mode in (ABORT, KEEP)

    def hold(self, request: Request) -> None:
        """Keep a request until generation continues."""
        self._held[request.request_id] = request

    def drop(self, request: Request) -> bool:
        """Drop a held request. Returns False if it is not held."""
        return self._held.pop(request.request_id, None) is not None

    def end(self) -> list[Request]:
        """Continue generation. Returns the held requests, first come first."""
        held, self._held, self.mode = list(self._held.values()), {}, None
        return held
