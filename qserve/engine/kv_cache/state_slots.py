"""StatePool: allocates slots of recurrent states."""

import math

from qserve.engine.request import Request

NO_SLOT = -1


class StatePool:
    """Allocates slots 0..num_slots-1, one to each running request.

    Slots are not cleared: a request that begins at position 0 treats its state as zeros
    (qkernels/causal_conv/state.py). An in-flight step may still write to a freed slot; the steps of
    the slot's next owner run after that step on the same stream.
    """

    def __init__(self, num_slots: int | None) -> None:
        """`num_slots`: None for a model without states; its requests get no slot."""
        self.num_slots = num_slots
        self._free = list(range(num_slots or 0))[::-1]
        self._forks: dict[int, int] = {}  # slot -> slot to copy from before the next step

    @property
    def num_free(self) -> float:
        return math.inf if self.num_slots is None else len(self._free)

    def take_(self, request: Request) -> None:
        """Allocate a slot for a request. A slot must be free."""
        if self.num_slots is not None:
            assert request.state_slot == NO_SLOT, "the request already has a state slot"
            request.state_slot = self._free.pop()

    def release_(self, request: Request) -> None:
        if self.num_slots is not None:
            self._forks.pop(request.state_slot, None)
            self._free.append(request.state_slot)
            request.state_slot = NO_SLOT

    def fork_(self, source: Request, target: Request) -> None:
        """Copy the state of `source` to `target` before the next step.

        Does nothing if `target` was preempted: it has no slot and recomputes its tokens.
        """
        if target.state_slot != NO_SLOT:
            self._forks[target.state_slot] = source.state_slot

    def take_forks(self) -> dict[int, int]:
        """Return the copies to make before the next step: target slot -> source slot."""
        forks, self._forks = self._forks, {}
        return forks

    def check_integrity(self, running: list[Request], waiting: list[Request]) -> None:
        """Assert that each running request has its own slot and no waiting request has one."""
        if self.num_slots is None:
            return
        held = [request.state_slot for request in running]
        if sorted([*held, *self._free]) != list(range(self.num_slots)):
            raise AssertionError(f"state slots lost or shared: held {held}, free {self._free}")
        if not self._forks.keys() | set(self._forks.values()) <= set(held):
            raise AssertionError(f"states of free slots are copied: {self._forks}")
        if any(request.state_slot != NO_SLOT for request in waiting):
            raise AssertionError("a waiting request holds a state slot")
