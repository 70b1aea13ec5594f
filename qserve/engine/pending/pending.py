"""PendingRequests: requests that are not queued in the scheduler yet.

A request waits for its grammar to be compiled, then for its adapter to get a device slot, then for
KV pages from other engines. Most requests need none of these. Steps continue in the meantime.
GrammarQueue holds requests that wait for grammars; Pause holds requests that arrive during a pause.
"""

from concurrent.futures import FIRST_COMPLETED, Future, wait

from formats.errors import InputError, one_line
from qserve.engine.control.commands import ABORT, KEEP, MODES
from qserve.engine.pending.peer_kv import PeerKv
from qserve.engine.pending.remote_kv import RemoteKv
from qserve.engine.request import Request, Status
from qserve.engine.scheduling.scheduler import Scheduler
from qserve.engine.token_event import TokenEvent
from qserve.errors import LEAVE_OUT, BusyError
from qserve.lora.adapter_table import AdapterTable
from qserve.model.model_config import ModelConfig
from qserve.structured.compiler import GrammarCompiler
from qserve.structured.params import StructuredOutputsParams

MAX_WAIT_SECONDS = 0.01  # longest wait of an engine that has nothing else to do


class GrammarQueue:
    """Compiles the grammars of one model, and holds the requests that wait for them."""

    def __init__(self, folder: str, model: ModelConfig) -> None:
        self._compiler = GrammarCompiler(folder, model.vocab_size, model.eos_token_ids)
        self._waiting: dict[Request, Future] = {}  # request -> its grammar, in order of arrival

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Start compiling a request's grammar. Raises InputError."""
        self._waiting[request] = self._compiler.submit(_grammar(request), request.client)

    def remove(self, request: Request) -> bool:
        """Remove a dropped request. Returns True if it waited here.

        The compilation of its grammar is cancelled unless another request waits for the grammar.
        """
        future = self._waiting.pop(request, None)
        if future is None:
            return False
        if not any(other is future for other in self._waiting.values()):
            self._compiler.cancel(_grammar(request))
        return True

    def take_compiled(self, *, wait_a_little: bool) -> list[tuple[Request, InputError | None]]:
        """Remove and return requests whose compilation has ended, with the error if it failed."""
        if wait_a_little:
            wait(self._waiting.values(), MAX_WAIT_SECONDS, FIRST_COMPLETED)
        found = []
        for request, future in list(self._waiting.items()):
            if not future.done():
                continue
            del self._waiting[request]
            try:
                request.constraint = self._compiler.constraint(future.result(), request.client)
                found.append((request, None))
            except InputError as error:
                found.append((request, error))
            except Exception as error:  # any failure must end only the requests of this grammar
                found.append(
                    (
                        request,
                        InputError(
                            "structured_outputs",
                            one_line(error),
                            "send another schema or grammar; the server's log has the details",
                        ),
                    )
                )
        return found

    def close(self) -> None:
        """Stop compiling."""
        self._compiler.close()


def _grammar(request: Request) -> StructuredOutputsParams:
    return request.params.structured_outputs


class PendingRequests:
    """Requests of one engine that are not in its scheduler yet."""

    def __init__(
        self,
        scheduler: Scheduler,
        grammars: GrammarQueue,
        adapters: AdapterTable | None,
        transfers: RemoteKv | PeerKv | None,
    ) -> None:
        self._scheduler, self._grammars = scheduler, grammars
        self._adapters, self._remote_kv = adapters, transfers

    @property
    def num_waiting(self) -> int:
        adapted = 0 if self._adapters is None else self._adapters.num_waiting
        for_pages = 0 if self._remote_kv is None else self._remote_kv.num_waiting
        return self._grammars.num_waiting + adapted + for_pages

    @property
    def has_work(self) -> bool:
        return self.num_waiting > 0 or (self._remote_kv is not None and self._remote_kv.has_work)

    def add(self, request: Request) -> None:
        """Add a request. It is queued when its grammar, adapter and pages are ready.

        Raises InputError.
        """
        if request.params.structured_outputs is not None:
            self._scheduler.check(request)
            self._grammars.add(request)
        else:
            self._add_compiled(request)

    def admit(self, *, is_idle: bool) -> list[TokenEvent]:
        """Queue the requests that are ready. Returns the last events of requests that failed.

        If the engine is idle, waits up to MAX_WAIT_SECONDS for each kind of work.
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
                    self._queue(request)
                else:
                    events.append(_refusal(request, error))
        if self._remote_kv is not None and self._remote_kv.has_work:
            self._remote_kv.queue_ready(wait_a_little=is_idle)
        return events

    def stop_waiting(self, request_id: str) -> None:
        """Stop waiting for KV pages of a request that are not announced yet."""
        if self._remote_kv is not None:
            self._remote_kv.stop_waiting(request_id)

    def remove(self, request: Request) -> bool:
        """Drop an aborted request. Returns True if it waited here."""
        return (
            (self._remote_kv is not None and self._remote_kv.remove(request))
            or (request.adapter is not None and self._adapters.drop(request))
            or self._grammars.remove(request)
        )

    def close(self) -> None:
        """Stop the processes that compile grammars."""
        self._grammars.close()

    def _add_compiled(self, request: Request) -> None:
        if request.adapter is None:
            self._queue(request)
        else:
            self._scheduler.check(request)
            self._adapters.add(request)

    def _queue(self, request: Request) -> None:
        """Queue a request, now or when its KV pages from other engines have arrived."""
        if self._remote_kv is None:
            self._scheduler.add(request)
        else:
            self._remote_kv.queue(request)


def _refusal(request: Request, reason: str, is_temporary: bool = False) -> TokenEvent:
    request.status = Status.FINISHED
    return TokenEvent.refusal(request.request_id, reason, is_temporary)


def check_mode(mode: str) -> None:
    """Raise InputError for an unknown mode."""
    if mode not in MODES:
        raise InputError(
            "mode", f"expected one of {', '.join(MODES)}, found {mode!r:.40}", LEAVE_OUT
        )


class Pause:
    """Pause state of one engine. Requests that arrive during a pause are held in order."""

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
        """True if no step may be launched, even for running requests."""
        return self.mode in (ABORT, KEEP)

    def hold(self, request: Request) -> None:
        """Hold a request until generation resumes."""
        self._held[request.request_id] = request

    def drop(self, request: Request) -> bool:
        """Drop a held request. Returns False if it is not held."""
        return self._held.pop(request.request_id, None) is not None

    def end(self) -> list[Request]:
        """End the pause. Returns the held requests in order of arrival."""
        held, self._held, self.mode = list(self._held.values()), {}, None
        return held
