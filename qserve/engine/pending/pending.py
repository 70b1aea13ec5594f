"""PendingRequests: requests that are not queued yet, while steps continue.

A request waits for its grammar to be compiled, then for a slot of its adapter, then for KV pages
from other engines. Most requests need none of these.
"""

from qserve.engine.pending.grammars import GrammarQueue
from qserve.engine.pending.peer_kv import PeerKv
from qserve.engine.pending.remote_kv import RemoteKv
from qserve.engine.request import Request, Status
from qserve.engine.scheduling.scheduler import Scheduler
from qserve.engine.token_event import TokenEvent
from qserve.errors import BusyError
from qserve.lora.adapter_table import AdapterTable


class PendingRequests:
    """Requests of one engine that its scheduler does not have yet."""

    def __init__(
        self,
        scheduler: Scheduler,
        grammars: GrammarQueue,
        adapters: AdapterTable | None,
        transfers: RemoteKv | PeerKv,
    ) -> None:
        self._scheduler, self._grammars = scheduler, grammars
        self._adapters, self._remote_kv = adapters, transfers

    @property
    def num_waiting(self) -> int:
        adapted = 0 if self._adapters is None else self._adapters.num_waiting
        return self._grammars.num_waiting + adapted + self._remote_kv.num_waiting

    @property
    def has_work(self) -> bool:
        return self.num_waiting > 0 or self._remote_kv.has_work

    def add(self, request: Request) -> None:
        """Queue a request as soon as it needs nothing more. Raises InputError."""
        if request.params.structured_outputs is not None:
            self._scheduler.check(request)
            self._grammars.add(request)
        else:
            self._add_compiled(request)

    def admit(self, *, is_idle: bool) -> list[TokenEvent]:
        """Queue the requests that need nothing more; return the ends of those that failed.

        Waits a little for them if the engine is idle.
        """
        events = []
        if self._grammars.num_waiting:
            for request, error in self._grammars.take_compiled(wait_a_little=is_idle):
                if error is None:
                    self._add_compiled(request)
                else:
                    is_temporary = isinstance(error, BusyError)
                    events.append(_refusal(request, str(error), is_temporary))
        if self._adapters is not None and self._adapters.num_waiting:
            for request, error in self._adapters.take_ready(wait_a_little=is_idle):
                if error is None:
                    self._remote_kv.queue(request)
                else:
                    events.append(_refusal(request, error))
        if self._remote_kv.has_work:
            self._remote_kv.queue_ready(wait_a_little=is_idle)
        return events

    def stop_waiting(self, request_id: str) -> None:
        """Await no further KV pages for a request than those that are announced."""
        self._remote_kv.stop_waiting(request_id)

    def remove(self, request: Request) -> bool:
        """Drop an aborted request. Returns True if it waited here."""
        return (
            self._remote_kv.remove(request)
            or (request.adapter is not None and self._adapters.drop(request))
            or self._grammars.remove(request)
        )

    def close(self) -> None:
        """Stop the processes that requests wait for."""
        self._grammars.close()

    def _add_compiled(self, request: Request) -> None:
        if request.adapter is None:
            self._remote_kv.queue(request)
        else:
            self._scheduler.check(request)
            self._adapters.add(request)


def _refusal(request: Request, reason: str, is_temporary: bool = False) -> TokenEvent:
    request.status = Status.FINISHED
    return TokenEvent.refusal(request.request_id, reason, is_temporary)
