"""RemoteKv: KV pages that come from other engines, and go to them, through a KvConnector.

A request whose pages are not all here waits, unqueued, while threads ask the connector for them
and read them into slots of the host tier; then it is queued and finds them. Steps go on meanwhile.
What a request computed is copied off the device when a token has come of it, and written by other
threads. Both are help, not need: what is late, refused or too much is computed, or not kept.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field

from qserve.config import EngineConfig
from qserve.engine.distributed.worker_group import WorkerGroup
from qserve.engine.kv_cache.prefix_cache import Export
from qserve.engine.request import Request
from qserve.engine.scheduling.plan import StepPlan
from qserve.engine.scheduling.scheduler import Scheduler
from qserve.engine.start_phases import phase
from qserve.engine.token_event import TokenEvent
from qserve.kv_transfer.config import KvTransferConfig
from qserve.kv_transfer.model_digest import page_digest
from qserve.kv_transfer.shared_pages import SharedPages
from qserve.model.model_config import ModelConfig

GIB = 2**30
RUN = 8  # pages that one thread loads before it looks for other work
PATIENCE_SECONDS = 10.0  # that a request waits for pages which do not come
MAX_WAIT_SECONDS = 0.01  # of an engine that has nothing else to do
MAX_UNWRITTEN_BYTES = GIB
# Slots of the host tier without --kv-offload-gb: loaded pages pass through them.
SLOT_BYTES = GIB

logger = logging.getLogger(__name__)


def num_slots(config: EngineConfig, page_bytes: int) -> int:
    """Slots of the host tier that an engine needs."""
    transfer = config.kv_transfer
    if config.kv_offload_gb == 0 and transfer is not None and not transfer.is_peer:
        return max(2, SLOT_BYTES // page_bytes)
    return int(config.kv_offload_gb * GIB) // page_bytes


@dataclass(slots=True, kw_only=True, eq=False)
class _Fetch:
    """Request that waits for pages."""

    request: Request
    beside: list[bytes]  # keys before the missing ones that are on the host
    keys: list[bytes]  # that are nowhere here; those that can be loaded, once that is known
    since: float
    match: Future | None  # None: another request fetches the first of these keys
    slots: list[int] = field(default_factory=list)
    loads: list[Future] = field(default_factory=list)  # of runs of slots

    @property
    def futures(self) -> list[Future]:
        return self.loads or ([] if self.match is None else [self.match])


class RemoteKv:
    """Exchange of KV pages with a connector. Only the engine's thread calls the methods.

    Requests pass through it to the scheduler also if there is no connector.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        config: KvTransferConfig | None = None,
        pages: SharedPages | None = None,
        *,
        model: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`model`: digest that distinguishes this model's pages (kv_transfer/model_digest.py)."""
        self._config, self._pages = config, pages
        self._scheduler, self._cache = scheduler, scheduler.cache
        self._host = scheduler.pool.host
        if config is not None:
            self._cache.model, self._cache.exports = model, [] if config.saves else None
        self._clock = clock
        self._fetches: dict[Request, _Fetch] = {}
        self._given_up: list[
            _Fetch
        ] = []  # no request waits for them, but threads write to their slots
        self._known: dict[bytes, None] = {}  # keys that the connector got, the latest last
        self._writes: dict[Future, int] = {}  # pages of each that is under way
        self._held: dict[str, tuple[TokenEvent, list[Future]]] = {}
        self._num_queries = self._num_hits = 0  # tokens

    @classmethod
    def make(
        cls,
        config: EngineConfig,
        model: ModelConfig,
        max_model_len: int,
        workers: WorkerGroup,
        scheduler: Scheduler,
    ) -> "RemoteKv":
        """Make it for an engine whose workers have slots. Raises InputError."""
        transfer = config.kv_transfer
        if transfer is None:
            return cls(scheduler)
        pages, runner = workers.open_pages(), workers.runner
        page_bytes = ", ".join(map(str, pages.page_bytes))
        # A drafter's keys lie in the same pages.
        form = f"{runner.kv_format}, {runner.decoder.dtype}, {config.block_size} tokens,"
        form += f" {page_bytes} bytes, {config.speculation}"
        if config.num_ranks > 1:
            form += f", tensor parallel {config.tensor_parallel_size}"
            form += f", stages {config.pipeline_parallel_size}"
        with phase("Digesting the weights"):
            digest = page_digest(
                config.model,
                model,
                max_model_len=max_model_len,
                dummy_seed=config.seed if config.load_format == "dummy" else None,
                form=form,
            )
        logger.info("KV pages are exchanged through %s as %s", transfer.connector, transfer.role)
        return cls(scheduler, transfer, pages, model=digest)

    @property
    def num_waiting(self) -> int:
        """Number of requests that are not queued yet."""
        return len(self._fetches)

    @property
    def has_work(self) -> bool:
        return bool(self._fetches or self._held)

    def take_counts(self) -> tuple[int, int]:
        """Tokens requested from the connector and tokens loaded, since the last call."""
        counts = self._num_queries, self._num_hits
        self._num_queries = self._num_hits = 0
        return counts

    def queue(self, request: Request) -> None:
        """Queue a request in the scheduler, now or when its pages are loaded. Raises InputError."""
        if not self._fetch(request):
            self._scheduler.add(request)

    def queue_ready(self, *, wait_a_little: bool) -> None:
        """Queue the requests whose pages are loaded or cannot be loaded."""
        for request in self._take_ready(wait_a_little):
            self._scheduler.add(request)

    def _fetch(self, request: Request) -> bool:
        """Look for a request's pages. Returns True if it waits for them."""
        if self._config is None or not self._config.loads:
            return False
        beside, keys = self._cache.missing(request)
        request.page_keys = []  # they may change before it is queued
        if not keys:
            return False
        self._scheduler.check(request)
        self._num_queries += len(keys) * self._cache.pool.page_size
        is_fetched = any(each.keys[0] == keys[0] for each in self._fetches.values())
        self._fetches[request] = _Fetch(
            request=request,
            beside=beside,
            keys=keys,
            since=self._clock(),
            match=None if is_fetched else self._pages.match(keys),
        )
        return True

    def remove(self, request: Request) -> bool:
        """Drop an aborted request. Returns True if it waited to be queued."""
        self._held.pop(request.request_id, None)
        found = self._fetches.pop(request, None)
        if found is None:
            return False
        if found.loads:
            self._given_up.append(found)
        if found.match is not None:
            for fetch in self._followers(found.keys[0])[:1]:  # the others follow this one then
                fetch.match = self._pages.match(fetch.keys)
        return True

    def _take_ready(self, wait_a_little: bool) -> list[Request]:
        """Requests that need not wait any more: all pages found for them are on the host."""
        if wait_a_little:
            futures = [each for fetch in self._fetches.values() for each in fetch.futures]
            futures += [each for _, writes in self._held.values() for each in writes]
            # A finished future would end the wait immediately, in every step.
            wait([each for each in futures if not each.done()], MAX_WAIT_SECONDS, FIRST_COMPLETED)
        for fetch in list(self._given_up):
            if all(future.done() for future in fetch.loads):
                self._given_up.remove(fetch)
                self._fill(fetch)
        ready = []
        for request, fetch in list(self._fetches.items()):
            if fetch.match is None or not self._is_done(fetch):
                continue
            del self._fetches[request]
            ready.append(request)
            ready += self._follow(fetch.keys[0])
        for request, fetch in list(self._fetches.items()):
            if self._clock() - fetch.since > PATIENCE_SECONDS:
                logger.warning(
                    "KV pages of %s did not come in %g s: it is computed",
                    request.request_id,
                    PATIENCE_SECONDS,
                )
                self.remove(request)
                ready.append(request)
        return ready

    def before_launch(self, plan: StepPlan) -> None:
        """Do nothing: pages are saved after their step."""

    def stop_waiting(self, request_id: str) -> None:
        """Do nothing: no request waits for pages that are still to be computed."""

    def after_step(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Save the pages of finished tokens. Returns the events that may be sent now."""
        if self._config is None:
            return events
        for future in [each for each in self._writes if each.done()]:
            del self._writes[future]
        writes: dict[str, list[Future]] = {}
        exports = self._cache.exports
        while exports:
            export = exports.pop(0)
            writes.setdefault(export.request_id, []).extend(self._save(export))
        if self._config.answers_after_saving:
            events = [event for event in events if not self._hold(event, writes)]
        for name, (event, under_way) in list(self._held.items()):
            if all(future.done() for future in under_way):
                del self._held[name]
                events = [*events, event]
        return events

    def _is_done(self, fetch: _Fetch) -> bool:
        """Take the results of a fetch's threads. Returns True if the fetch is complete."""
        if not all(future.done() for future in fetch.futures):
            return False
        if fetch.loads:
            self._fill(fetch)
            return True
        count = fetch.match.result()
        beside = [key for key in fetch.beside if self._host.match([key])]
        fetch.slots = self._host.reserve(count, beside) if count else []
        if not fetch.slots:
            return True
        for start in range(0, len(fetch.slots), RUN):
            slots = fetch.slots[start : start + RUN]
            keys = fetch.keys[start : start + len(slots)]
            fetch.loads.append(self._pages.load(keys, slots))
        return False

    def _fill(self, fetch: _Fetch) -> None:
        """Insert loaded pages into the host tier."""
        loaded = [each for future in fetch.loads for each in future.result()]
        for key, slot, is_there in zip(fetch.keys, fetch.slots, loaded, strict=False):
            if is_there:
                self._host.fill(key, slot)
                self._note(key)
            else:
                self._host.give_up(slot)
        self._num_hits += sum(loaded) * self._cache.pool.page_size

    def _follow(self, key: bytes) -> list[Request]:
        """Requests that waited for another request's fetch, which began at this key."""
        ready = []
        for fetch in self._followers(key):
            del self._fetches[fetch.request]
            _, keys = self._cache.missing(fetch.request)
            if not keys or keys[0] == key:  # all is here, or it is nowhere
                fetch.request.page_keys = []
                ready.append(fetch.request)
            elif not self._fetch(fetch.request):
                ready.append(fetch.request)
        return ready

    def _followers(self, key: bytes) -> list[_Fetch]:
        """Fetches that wait for another request's fetch, which begins at this key."""
        fetches = self._fetches.values()
        return [each for each in fetches if each.match is None and each.keys[0] == key]

    def _save(self, export: Export) -> list[Future]:
        """Copy a request's new pages off the device and begin to write them."""
        pairs = [
            (key, page)
            for key, page in zip(export.keys, export.pages, strict=True)
            if key not in self._known
        ]
        most = max(1, MAX_UNWRITTEN_BYTES // sum(self._pages.page_bytes))
        most -= sum(self._writes.values())
        if len(pairs) > most:
            logger.warning(
                "%d KV pages of %s are not saved: too many wait to be written",
                len(pairs) - most,
                export.request_id,
            )
            pairs = pairs[:most]
        started = []
        for start in range(0, len(pairs), RUN):
            run = pairs[start : start + RUN]
            for key, _ in run:
                self._note(key)
            future = self._pages.save([key for key, _ in run], [page for _, page in run])
            self._writes[future] = len(run)
            started.append(future)
        return started

    def _hold(self, event: TokenEvent, writes: dict[str, list[Future]]) -> bool:
        """Hold a final event until its pages are saved. Returns True if it is held."""
        under_way = writes.get(event.request_id)
        if event.finish_reason in (None, "error") or not under_way:
            return False
        self._held[event.request_id] = event, under_way
        return True

    def _note(self, key: bytes) -> None:
        self._known.pop(key, None)
        self._known[key] = None
        if len(self._known) > 4 * self._cache.pool.num_pages + 1024:
            del self._known[next(iter(self._known))]
