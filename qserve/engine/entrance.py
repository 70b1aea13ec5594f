"""Entrance: what a request waits for before it is queued, each in turn, while steps go on.

First the grammar of its output is compiled, then its adapter gets a slot on the device, then KV
pages come from other engines. Most requests need none of these.
"""

from qserve.engine.constrained import Constrained
from qserve.engine.page_transfers import PageTransfers
from qserve.engine.request import Request, RequestEvent, Status
from qserve.engine.scheduler import Scheduler
from qserve.lora.adapter_table import AdapterTable


class Entrance:
    """Stands before one engine's scheduler."""

    def __init__(
        self,
        scheduler: Scheduler,
        constrained: Constrained,
        adapters: AdapterTable | None,
        transfers: PageTransfers,
    ) -> None:
        self._scheduler, self._constrained = scheduler, constrained
        self._adapters, self._transfers = adapters, transfers

    @property
    def num_waiting(self) -> int:
        adapted = 0 if self._adapters is None else self._adapters.num_waiting
        return self._constrained.num_waiting + adapted + self._transfers.num_waiting

    @property
    def has_work(self) -> bool:
        return self.num_waiting > 0 or self._transfers.has_work

    def add(self, request: Request) -> None:
        """Queue a request, now or when it has all that it needs. Raises InputError."""
        if request.params.structured_outputs is not None:
            self._scheduler.check(request)
            self._constrained.add(request)
        else:
            self._add_compiled(request)

    def admit(self, *, is_idle: bool) -> list[RequestEvent]:
        """Queue those that have all they need; of those that will never have it, the ends.

        Waits a little for them where the engine has nothing else to do.
        """
        events = []
        if self._constrained.num_waiting:
            for request, error in self._constrained.take_compiled(wait_a_little=is_idle):
                if error is None:
                    self._add_compiled(request)
                else:
                    events.append(_refusal(request, error))
        if self._adapters is not None and self._adapters.num_waiting:
            for request, error in self._adapters.take_ready(wait_a_little=is_idle):
                if error is None:
                    self._transfers.queue(request)
                else:
                    events.append(_refusal(request, error))
        if self._transfers.has_work:
            self._transfers.queue_ready(wait_a_little=is_idle)
        return events

    def remove(self, request: Request) -> bool:
        """Forget one that is not wanted any more. Returns whether it waited here."""
        return (
            self._transfers.remove(request)
            or (request.adapter is not None and self._adapters.drop(request))
            or self._constrained.remove(request)
        )

    def _add_compiled(self, request: Request) -> None:
        if request.adapter is None:
            self._transfers.queue(request)
        else:
            self._scheduler.check(request)
            self._adapters.add(request)


def _refusal(request: Request, reason: str) -> RequestEvent:
    request.status = Status.FINISHED
    return RequestEvent.refusal(request.request_id, reason)
