"""StatePool: the slots of recurrent states."""

import math

from qserve.engine.request import Request

NO_SLOT = -1


class StatePool:
    """Allocates slots 0..num_slots-1, one to each running request.

    Slots are not cleared: a request that begins at position 0 treats its state as zeros
    (qkernels/causal_conv/state.py). An in-flight step may still write to a freed slot; the next
    owner's steps come after it on the same stream.
    """

    def __init__(self, num_slots: int | None) -> None:
        """`num_slots`: None for a model without states, whose requests get no slot."""
        self.num_slots = num_slots
        self._free = list(range(num_slots or 0))[::-1]
        self._forks: dict[
            int, int
        ] = {}  # slot -> slot that it is copied from, before the next step

    @property
    def num_free(self) -> float:
        return math.inf if self.num_slots is None else len(self._free)

    def take_(self, request: Request) -> None:
        """Allocate a slot for a request. There must be a free one."""
        if self.num_slots is not None:
            assert request.state_slot == NO_SLOT, "the request already has a state slot"
            request.state_slot = self._free.pop()

    def release_(self, request: Request) -> None:
        if self.num_slots is not None:
            self._forks.pop(request.state_slot, None)
            self._free.append(request.state_slot)
            request.state_slot = NO_SLOT

    def fork_(self, source: Request, target: Request) -> None:
        """Give a request the state of another before the next step.

        Preempted requests have none: they compute their tokens again.
        """
        if target.state_slot != NO_SLOT:
            self._forks[target.state_slot] = source.state_slot

    def take_forks(self) -> dict[int, int]:
        """Return the copies to make before the next step."""
        forks, self._forks = self._forks, {}
        return forks

    def check_integrity(self, running: list[Request], waiting: list[Request]) -> None:
        """Assert that each running request has its own slot, and no waiting one has any."""
        if self.num_slots is None:
            return
        held = [request.state_slot for request in running]
        if sorted([*held, *self._free]) != list(range(self.num_slots)):
            raise AssertionError(f"state slots lost or shared: held {held}, free {self._free}")
        if not self._forks.keys() | set(self._forks.values()) <= set(held):
            raise AssertionError(f"states of free slots are copied: {self._forks}")
        if any(request.state_slot != NO_SLOT for request in waiting):
            raise AssertionError("a waiting request holds a state slot")
