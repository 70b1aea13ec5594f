"""RemoteKv: loads KV pages of other engines, and saves pages for them, through a KvConnector.

A request that lacks pages is not queued yet. Threads ask the connector for the missing pages and
read them into slots of the host tier, while steps continue. Then the request is queued and finds
its pages. After the first token of a request and at its end, its pages are copied off the device,
and other threads write them. Both are best effort: pages that are late, refused or do not fit are
computed instead of loaded, or are not saved.

For a model with states, pages are useful only up to a state snapshot. A request of such a model
waits for the deepest snapshot that has all pages before it, or does not wait.
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
RUN = 8  # pages that one thread loads or saves as one unit of work
PATIENCE_SECONDS = 10.0  # longest wait of a request for its pages
MAX_WAIT_SECONDS = 0.01  # longest wait of an engine that has nothing else to do
MAX_UNWRITTEN_BYTES = GIB
# Size of the host tier without --kv-offload-gb; loaded pages pass through it.
SLOT_BYTES = GIB
MAX_SLOT_BYTES = 8 * GIB  # the same for models with states

STATE = b"state "  # prefix + key of a page: marks the snapshot at the end of that page

logger = logging.getLogger(__name__)


def digest_of_pages(config: EngineConfig, model: ModelConfig, max_model_len: int, form: str) -> str:
    """Return the digest of everything that an engine's pages depend on.

    `form`: describes what they depend on besides the model.
    """
    with phase("Digesting the weights"):
        return page_digest(
            config.model,
            model,
            max_model_len=max_model_len,
            dummy_seed=config.seed if config.load_format == "dummy" else None,
            form=form,
        )


def host_bytes(config: EngineConfig, page_bytes: int, state_bytes: int, max_model_len: int) -> int:
    """Return the bytes of host memory for an engine's host tiers."""
    transfer = config.kv_transfer
    if config.kv_offload_gb or transfer is None or transfer.is_peer:
        return int(config.kv_offload_gb * GIB)
    if not state_bytes:
        return max(SLOT_BYTES, 2 * page_bytes)
    # All pages of a prompt are loaded together. They may use at most half of the page slots, and
    # page slots are half of the memory: hence the factor 4.
    longest = 4 * -(-max_model_len // config.block_size) * page_bytes
    return max(SLOT_BYTES, min(longest, MAX_SLOT_BYTES), 2 * page_bytes + 8 * state_bytes)


@dataclass(slots=True, kw_only=True, eq=False)
class _Fetch:
    """A request that waits for pages."""

    request: Request
    keep: list[bytes]  # keys before the missing ones, whose pages are in the host tier
    keys: list[bytes]  # keys whose pages this engine lacks
    since: float  # start of the wait
    match: Future | None  # number of pages found; None: another request fetches the same first key
    states: "_StateFetch | None" = None  # for models with states
    slots: list[int] = field(default_factory=list)  # reserved in the host tier, for the first keys
    loads: list[Future] = field(default_factory=list)  # one per RUN of slots

    @property
    def first(self) -> bytes:
        """The first key to fetch."""
        return self.keys[0] if self.keys else self.states.first

    @property
    def futures(self) -> list[Future]:
        if self.loads or self.match is None:
            return self.loads
        return [self.match] if self.states is None else [self.match, self.states.match]


@dataclass(slots=True, kw_only=True, eq=False)
class _StateFetch:
    """A state snapshot that a request waits for."""

    first: bytes  # first of the keys
    keys: list[bytes]  # all keys after the deepest snapshot that this engine can use
    num_with_pages: int  # number of these keys whose pages this engine has
    match: Future | None = None  # number of keys up to the connector's deepest snapshot
    key: bytes = b""  # key of the snapshot to load
    slots: list[int] = field(default_factory=list)  # one host slot, if the snapshot is loaded
    load: Future | None = None


class RemoteKv:
    """Exchanges KV pages through a connector. Only the engine's thread may call the methods."""

    def __init__(
        self,
        scheduler: Scheduler,
        config: KvTransferConfig,
        pages: SharedPages,
        states: SharedPages | None,
        *,
        model: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`model`: digest that is part of all page keys (kv_transfer/model_digest.py)."""
        self._config, self._pages, self._states = config, pages, states
        self._scheduler, self._cache = scheduler, scheduler.cache
        self._host = scheduler.pool.host
        snapshots = scheduler.snapshots
        self._state_host = None if snapshots is None else snapshots.host
        self._cache.model, self._cache.exports = model, [] if config.saves else None
        self._clock = clock
        self._fetches: dict[Request, _Fetch] = {}
        # fetches of dropped requests; threads still write to their slots
        self._given_up: list[_Fetch] = []
        self._known: dict[bytes, None] = {}  # keys that the connector has, the latest last
        self._writes: dict[Future, int] = {}  # unfinished write -> its number of pages
        # request id -> final event, held until these writes end
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
        """Open the connector of an engine. Its workers must have host slots. Raises InputError."""
        transfer = config.kv_transfer
        (pages, states), runner = workers.open_pages(), workers.runner
        page_bytes = ", ".join(map(str, pages.page_bytes))
        # The speculation settings count too: pages also hold the drafter's keys and values.
        form = f"{runner.kv_format}, {runner.decoder.dtype}, {config.block_size} tokens,"
        form += f" {page_bytes} bytes, {config.speculation}"
        if states is not None:
            form += f", states of {', '.join(map(str, states.page_bytes))} bytes"
        if config.num_ranks > 1:
            form += f", tensor parallel {config.tensor_parallel_size}"
            form += f", stages {config.pipeline_parallel_size}"
        digest = digest_of_pages(config, model, max_model_len, form)
        logger.info("KV pages are exchanged through %s as %s", transfer.connector, transfer.role)
        return cls(scheduler, transfer, pages, states, model=digest)

    @property
    def num_waiting(self) -> int:
        """Number of requests that are not queued yet."""
        return len(self._fetches)

    @property
    def has_work(self) -> bool:
        return bool(self._fetches or self._held)

    def take_counts(self) -> tuple[int, int]:
        """Return the tokens requested from the connector and those loaded since the last call."""
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
        """Start to fetch a request's missing pages. Returns True if the request waits for them."""
        if not self._config.loads:
            return False
        missing = self._cache.missing(request)
        request.page_keys = []  # the keys may change before the request is queued
        keys, states = missing.elsewhere, None
        if self._states is not None:
            if not missing.states:
                return False
            states = _StateFetch(
                first=missing.states[0],
                keys=missing.states,
                num_with_pages=missing.num_with_pages,
            )
        elif not keys:
            return False
        self._scheduler.check(request)
        self._num_queries += len(keys) * self._cache.pool.page_size
        fetch = _Fetch(
            request=request,
            keep=missing.on_host,
            keys=keys,
            since=self._clock(),
            match=None,
            states=states,
        )
        if not any(each.first == fetch.first for each in self._fetches.values()):
            self._match(fetch)
        self._fetches[request] = fetch
        return True

    def _match(self, fetch: _Fetch) -> None:
        """Ask the connector how many of a fetch's pages and snapshots it has."""
        fetch.match = self._pages.match(fetch.keys)
        if fetch.states is not None:
            fetch.states.match = self._states.deepest(fetch.states.keys)

    def remove(self, request: Request) -> bool:
        """Drop an aborted request. Returns True if it was not queued yet."""
        self._held.pop(request.request_id, None)
        found = self._fetches.pop(request, None)
        if found is None:
            return False
        if found.loads:
            self._given_up.append(found)
        if found.match is not None:
            for fetch in self._followers(found.first)[:1]:  # the other followers now follow it
                self._match(fetch)
        return True

    def _take_ready(self, wait_a_little: bool) -> list[Request]:
        """Remove and return the requests that can be queued: pages are loaded, or too late."""
        if wait_a_little:
            futures = [each for fetch in self._fetches.values() for each in fetch.futures]
            futures += [each for _, writes in self._held.values() for each in writes]
            # Finished futures are left out, because with one of them wait() returns immediately.
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
            ready += self._follow(fetch.first)
        for request, fetch in list(self._fetches.items()):
            if self._clock() - fetch.since > PATIENCE_SECONDS:
                logger.warning(
                    "KV pages of %s did not arrive within %g s; computing them",
                    request.request_id,
                    PATIENCE_SECONDS,
                )
                self.remove(request)
                ready.append(request)
        return ready

    def end_fetches(self) -> None:
        """Do nothing: threads write to the host tier, whose memory stays allocated."""

    def before_launch(self, plan: StepPlan) -> None:
        """Do nothing: pages are saved after their step."""

    def stop_waiting(self, request_id: str) -> None:
        """Do nothing: no request waits for pages that are still to be computed."""

    def after_step(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Start saving the exported pages. Returns the events that may be sent to clients now."""
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
        """Advance a fetch whose threads have finished. Returns True if the fetch is complete."""
        if not all(future.done() for future in fetch.futures):
            return False
        if fetch.loads:
            self._fill(fetch)
            return True
        count = fetch.match.result()
        if fetch.states is not None:
            if self._asks_again(fetch.states, count):
                return False
            count = self._pages_to_state(fetch.states)
        keep = [key for key in fetch.keep if key in self._host]
        fetch.slots = self._host.reserve(count, keep) if count else []
        if fetch.states is not None and not self._begin_state(fetch, count):
            return True
        if not fetch.slots and not fetch.loads:
            return True
        for start in range(0, len(fetch.slots), RUN):
            slots = fetch.slots[start : start + RUN]
            keys = fetch.keys[start : start + len(slots)]
            fetch.loads.append(self._pages.load(keys, slots))
        return False

    def _asks_again(self, states: _StateFetch, count: int) -> bool:
        """If the deepest snapshot lacks pages, ask for a shallower one. Returns True if it asked.

        `count`: number of pages that can be loaded.
        """
        most = states.num_with_pages + count
        if states.match.result() <= most:
            return False
        states.keys = states.keys[:most]
        if states.keys:
            states.match = self._states.deepest(states.keys)
        return bool(states.keys)

    def _pages_to_state(self, states: _StateFetch) -> int:
        """Choose the deepest snapshot. Returns the number of pages to load for it."""
        depth = states.match.result() if states.keys else 0
        if not depth:
            return 0
        states.key = states.keys[depth - 1]
        return max(0, depth - states.num_with_pages)

    def _begin_state(self, fetch: _Fetch, count: int) -> bool:
        """Start loading a fetch's snapshot. Returns False if the host lacks room for it.

        `count`: number of pages to load; they must have room too.
        """
        states, host = fetch.states, self._state_host
        if states.key and states.key not in host:
            states.slots = host.reserve(1)
        is_there = bool(states.slots) or states.key in host
        if not states.key or not is_there or len(fetch.slots) < count:
            if states.key:
                logger.info(
                    "No host memory for %d KV pages of %s and their states; computing them"
                    " (raise --kv-offload-gb)",
                    count,
                    fetch.request.request_id,
                )
            for slot in fetch.slots:
                self._host.give_up(slot)
            for slot in states.slots:
                host.give_up(slot)
            fetch.slots, states.slots = [], []
            return False
        if states.slots:
            states.load = self._states.load([states.key], states.slots)
            fetch.loads.append(states.load)
        return True

    def _fill(self, fetch: _Fetch) -> None:
        """Insert loaded pages into the host tier, and the state snapshot at their end."""
        states = fetch.states
        if states is not None and states.load is not None:
            fetch.loads.remove(states.load)
            for slot, is_there in zip(states.slots, states.load.result(), strict=True):
                if is_there:
                    self._state_host.fill(states.key, slot)
                    self._note(STATE + states.key)
                else:
                    self._state_host.give_up(slot)
        loaded = [each for future in fetch.loads for each in future.result()]
        for key, slot, is_there in zip(fetch.keys, fetch.slots, loaded, strict=False):
            if is_there:
                self._host.fill(key, slot)
                self._note(key)
            else:
                self._host.give_up(slot)
        self._num_hits += sum(loaded) * self._cache.pool.page_size

    def _follow(self, key: bytes) -> list[Request]:
        """Continue requests that waited for a fetch that began at `key`. Returns the ready ones."""
        ready = []
        for fetch in self._followers(key):
            del self._fetches[fetch.request]
            missing = self._cache.missing(fetch.request)
            keys = missing.elsewhere or missing.states
            if not keys or keys[0] == key:  # nothing is missing, or the fetch found nothing
                fetch.request.page_keys = []
                ready.append(fetch.request)
            elif not self._fetch(fetch.request):
                ready.append(fetch.request)
        return ready

    def _followers(self, key: bytes) -> list[_Fetch]:
        """Return the fetches that wait for another request's fetch, which begins at `key`."""
        fetches = self._fetches.values()
        return [each for each in fetches if each.match is None and each.first == key]

    def _save(self, export: Export) -> list[Future]:
        """Copy a request's new pages off the device and start writing them."""
        pairs = [
            (key, page)
            for key, page in zip(export.keys, export.pages, strict=True)
            if key not in self._known
        ]
        most = max(1, MAX_UNWRITTEN_BYTES // sum(self._pages.page_bytes))
        most -= sum(self._writes.values())
        if len(pairs) > most:
            logger.warning(
                "%d KV pages of %s are not saved: too many pages are queued for writing",
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
        return [*started, *self._save_states(export, most - len(pairs))]

    def _save_states(self, export: Export, most: int) -> list[Future]:
        """Copy a request's new state snapshots off the device and start writing them.

        `most`: limit on the size, in pages; the last snapshot may exceed it.
        """
        started = []
        for key, slot in export.states:
            if STATE + key in self._known:
                continue
            if most <= 0:
                logger.warning(
                    "States of %s are not saved: too many pages are queued for writing",
                    export.request_id,
                )
                break
            size = -(-sum(self._states.page_bytes) // sum(self._pages.page_bytes))
            self._note(STATE + key)
            future = self._states.save([key], [slot])
            self._writes[future] = size
            started.append(future)
            most -= size
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
