"""The pool of state slots: which request has which. Knows no contents."""

import math

from qserve.engine.request import Request

NO_SLOT = -1


class StatePool:
    """Hands out slots 0..num_slots-1, one to each running request.

    Nothing is cleared: a request that begins at position 0 takes its state for zeros
    (qkernels/delta_net/state.py). A step in flight may still write to a slot that was given back;
    the next owner's steps come after it on the same device queue.
    """

    def __init__(self, num_slots: int | None) -> None:
        """None: of a model without states, whose requests get no slot."""
        self.num_slots = num_slots
        self._free = list(range(num_slots or 0))[::-1]

    @property
    def num_free(self) -> float:
        return math.inf if self.num_slots is None else len(self._free)

    def take_(self, request: Request) -> None:
        """Give a request a slot. There must be a free one."""
        if self.num_slots is not None:
            assert request.state_slot == NO_SLOT, "a request has one state"
            request.state_slot = self._free.pop()

    def give_back_(self, request: Request) -> None:
        if self.num_slots is not None:
            self._free.append(request.state_slot)
            request.state_slot = NO_SLOT

    def check_integrity(self, running: list[Request], waiting: list[Request]) -> None:
        """Assert that each running request has a slot of its own, and no other one has any."""
        if self.num_slots is None:
            return
        held = [request.state_slot for request in running]
        if sorted([*held, *self._free]) != list(range(self.num_slots)):
            raise AssertionError(f"state slots lost or shared: held {held}, free {self._free}")
        if any(request.state_slot != NO_SLOT for request in waiting):
            raise AssertionError("a waiting request holds a state slot")
