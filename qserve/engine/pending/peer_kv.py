"""PeerKv: exchanges KV pages with other engines through the connector `peer` or `nixl`.

A sending engine names the pages that a step completes before it launches the step. A receiving
engine reserves pages for a request, and threads fill them. When they are filled, the request is
queued and finds them in the prefix cache. Pages that do not arrive are computed.

For a model with states, the sending engine also sends the states from which its prompts continue.
The receiving engine first receives the pages and then the deepest state that they lead to.
"""

import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field

from qserve.config import EngineConfig
from qserve.engine.distributed.worker_group import WorkerGroup
from qserve.engine.kv_cache.block_pool import NULL_PAGE
from qserve.engine.pending.remote_kv import MAX_WAIT_SECONDS, digest_of_pages
from qserve.engine.request import Request
from qserve.engine.scheduling.plan import StepPlan
from qserve.engine.scheduling.scheduler import Scheduler
from qserve.engine.token_event import TokenEvent
from qserve.kv_transfer.config import KvTransferConfig
from qserve.kv_transfer.peer.shared_pages import SharedPeerPages
from qserve.model.model_config import ModelConfig

ROOM_SECONDS = 5.0  # longest wait for free pages; then the prompt is computed

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class _Fetch:
    """A request that waits for pages."""

    request: Request
    first: bytes  # first key that this engine lacks
    keys: list[bytes]  # of the pages to receive
    since: float  # start of the wait
    states: "_StateFetch"
    table: list[int] | None = None  # reserved pages; None: too few were free so far
    number: int = 0  # number of the call that fills the pages
    loads: Future | None = None  # result of that call

    @property
    def futures(self) -> list[Future]:
        return [each for each in (self.loads, self.states.load) if each is not None]

    @property
    def num_loaded(self) -> int:
        """Number of leading pages that have arrived. They must not be under way."""
        loaded = self.loads.result()
        return loaded.index(False) if False in loaded else len(loaded)


@dataclass(slots=True, kw_only=True, eq=False)
class _StateFetch:
    """The state that a request waits for. Empty for a model without states."""

    # keys of pages at whose ends a state is useful; the last of these states is the best
    keys: list[bytes] = field(default_factory=list)
    num_with_pages: int = 0  # number of these keys whose pages this engine had before
    since: float | None = None  # start of the wait; None: the pages are still under way
    slot: int | None = None  # reserved slot; None: none is needed, or none was free so far
    key: bytes = b""  # key of the state to receive
    number: int = 0  # number of the call that fills the slot
    load: Future | None = None  # result of that call
    may_come: bool = True  # True: a state that is not announced yet may still be awaited


class PeerKv:
    """Exchanges KV pages with peers. Only the engine's thread may call the methods."""

    def __init__(
        self,
        scheduler: Scheduler,
        config: KvTransferConfig,
        pages: SharedPeerPages,
        states: SharedPeerPages | None,
        *,
        model: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`model`: digest that is part of all page keys (kv_transfer/model_digest.py)."""
        self._config, self._clock = config, clock
        self._pages, self._states = pages, states
        self._scheduler, self._cache = scheduler, scheduler.cache
        self._pool, self._snapshots = scheduler.pool, scheduler.snapshots
        self._cache.model = model
        self._fetches: dict[Request, _Fetch] = {}
        # request -> first key of another request's fetch, for whose end it waits
        self._followers: dict[Request, bytes] = {}
        self._given_up: list[_Fetch] = []  # fetches of dropped requests; threads still fill pages
        self._num_sent: dict[str, int] = {}  # leading pages of a request that were handled
        self._num_queries = self._num_hits = 0  # tokens

    @classmethod
    def make(
        cls,
        config: EngineConfig,
        model: ModelConfig,
        max_model_len: int,
        workers: WorkerGroup,
        scheduler: Scheduler,
    ) -> "PeerKv":
        """Open the connector of an engine. Its workers must have KV pages. Raises InputError."""
        runner = workers.runner
        form = {
            "KV cache format": str(runner.kv_format),
            "activations": str(runner.decoder.dtype).removeprefix("torch."),
            "block size": f"{config.block_size} tokens",
        }
        if runner.speculator is not None and runner.speculator.caches:
            drafter = config.speculation  # pages also hold the drafter's keys and values
            form["drafter"] = f"{drafter.method} of {drafter.model or 'the model'}"
        if runner.has_states:  # a slot also keeps the inputs of so many rows
            form["rows of a verification"] = str(runner.most_rows)
        text = json.dumps(form)
        digest = digest_of_pages(config, model, max_model_len, text)
        pages, states = workers.open_peer(digest, text)
        transfer = config.kv_transfer
        logger.info("KV pages are exchanged by %s as %s", transfer.connector, transfer.role)
        return cls(scheduler, transfer, pages, states, model=digest)

    @property
    def num_waiting(self) -> int:
        """Number of requests that are not queued yet."""
        return len(self._fetches) + len(self._followers)

    @property
    def has_work(self) -> bool:
        return bool(self._fetches or self._followers or self._given_up)

    def take_counts(self) -> tuple[int, int]:
        """Return the tokens requested from peers and the tokens received since the last call."""
        counts = self._num_queries, self._num_hits
        self._num_queries = self._num_hits = 0
        return counts

    def queue(self, request: Request) -> None:
        """Queue a request in the scheduler when its pages have arrived. Raises InputError."""
        if not self._fetch(request):
            self._scheduler.add(request)

    def queue_ready(self, *, wait_a_little: bool) -> None:
        """Queue the requests whose pages have arrived or will not arrive."""
        if wait_a_little:
            fetches = [*self._fetches.values(), *self._given_up]
            futures = [future for each in fetches for future in each.futures]
            futures = [each for each in futures if not each.done()]
            if futures:
                wait(futures, MAX_WAIT_SECONDS, FIRST_COMPLETED)
            else:
                time.sleep(MAX_WAIT_SECONDS / 10)
        for fetch in list(self._given_up):
            if all(future.done() for future in fetch.futures):
                self._given_up.remove(fetch)
                self._settle(fetch)
        for request, fetch in list(self._fetches.items()):
            if fetch.loads is None and not self._begin(fetch):
                if self._clock() - fetch.since > ROOM_SECONDS:
                    logger.warning(
                        "No free KV pages to receive the prompt of %s; computing it here",
                        request.request_id,
                    )
                    self._finish(fetch)
            elif fetch.loads.done() and self._has_state(fetch):
                self._settle(fetch)
                self._finish(fetch)

    def stop_waiting(self, request_id: str) -> None:
        """Stop waiting for unannounced pages: the other engine has finished or failed."""
        for request, fetch in list(self._fetches.items()):
            if request.request_id != request_id:
                continue
            request.awaits_pages = False
            if fetch.loads is not None:
                self._pages.expect_no_more(fetch.number)
            if fetch.states.load is not None:
                self._states.expect_no_more(fetch.states.number)
        for request in self._followers:
            if request.request_id == request_id:
                request.awaits_pages = False

    def remove(self, request: Request) -> bool:
        """Drop an aborted request. Returns True if it was not queued yet."""
        self._num_sent.pop(request.request_id, None)
        if self._followers.pop(request, None) is not None:
            return True
        fetch = self._fetches.get(request)
        if fetch is None:
            return False
        if fetch.loads is not None:
            self._cancel(fetch)
            self._given_up.append(fetch)
        self._finish(fetch, queues=False)
        return True

    def end_fetches(self) -> None:
        """Queue all requests now, because pages are about to be freed or invalidated.

        Waits for the threads that fill pages.
        """
        fetches = [each for each in self._fetches.values() if each.loads is not None]
        for fetch in fetches:
            self._cancel(fetch)
        for fetch in (*fetches, *self._given_up):
            wait(fetch.futures)
            self._pool.settle_(fetch.table, [])
            if fetch.states.slot is not None:
                self._snapshots.give_up(fetch.states.slot)
        waiting = [*self._fetches, *self._followers]
        self._fetches, self._followers, self._given_up = {}, {}, []
        for request in waiting:
            self._scheduler.add(request)

    def before_launch(self, plan: StepPlan) -> None:
        """Send the prompt pages that a step completes, and the states with which it begins."""
        if not self._pages.sends:
            return
        if self._states is not None:
            self._send_states(plan)
        keys: list[bytes] = []
        pages: list[int] = []
        for request, start, count, _ in plan.chunks:
            known = self._num_sent.get(request.request_id, 0)
            if start >= request.num_prompt_tokens:
                continue
            end = min(start + count, request.num_prompt_tokens) // self._pool.page_size
            end = min(end, len(request.page_keys))
            self._num_sent[request.request_id] = max(known, end)
            for index in range(known, end):
                key, page = request.page_keys[index], request.block_table[index]
                if page != NULL_PAGE and not self._pages.has(key):
                    keys.append(key)
                    pages.append(page)
        if keys:
            unique = dict(zip(keys, pages, strict=True))
            self._pages.send(list(unique), list(unique.values()))

    def _send_states(self, plan: StepPlan) -> None:
        """Send states from which the prompts of a step continue.

        These are the states that a prompt starts from, and those at which its chunks end because a
        snapshot is due. They are in the slots of the requests when the step begins.
        """
        size, found = self._pool.page_size, {}
        for request, start, _, _ in plan.chunks:
            if not 0 < start < request.num_prompt_tokens or start % size:
                continue
            begins = request.request_id not in self._num_sent
            index = start // size - 1
            if (begins or start in request.snapshots_at) and index < len(request.page_keys):
                key = request.page_keys[index]
                if not self._states.has(key):
                    found[key] = request.state_slot
        if found:
            self._states.send(list(found), list(found.values()))

    def after_step(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Return the events that may be sent to clients now, which are all of them."""
        for event in events:
            if event.finish_reason is not None:
                self._num_sent.pop(event.request_id, None)
        return events

    def _fetch(self, request: Request) -> bool:
        """Start to fetch a request's missing pages. Returns True if the request waits for them."""
        if not self._config.loads:
            return False
        missing = self._cache.missing(request)
        request.page_keys = []  # the keys may change before the request is queued
        keys, states = missing.elsewhere, missing.states
        if not (keys if self._states is None else states):
            return False
        self._scheduler.check(request)
        first = (keys or states)[0]
        if any(each.first == first for each in self._fetches.values()):
            self._followers[request] = first
            return True
        self._num_queries += len(keys) * self._pool.page_size
        if not request.awaits_pages:
            keys, states = self._announced(keys, states, missing.num_with_pages)
        elif not self._has_peers:
            logger.warning(
                "No KV peer to send the prompt of %s; computing it here", request.request_id
            )
            keys, states = [], []
        if not keys and not states:
            return False
        fetch = _Fetch(
            request=request,
            first=first,
            keys=keys,
            since=self._clock(),
            states=_StateFetch(keys=states, num_with_pages=missing.num_with_pages),
        )
        self._fetches[request] = fetch
        self._begin(fetch)
        return True

    @property
    def _has_peers(self) -> bool:
        """True if another engine can send pages and, if the model has them, states."""
        return bool(self._pages.num_peers and (self._states is None or self._states.num_peers))

    def _announced(
        self, keys: list[bytes], states: list[bytes], num_with_pages: int
    ) -> tuple[list[bytes], list[bytes]]:
        """Return the keys of pages and of states that are worth receiving now.

        `num_with_pages`: number of keys in `states` whose pages this engine has.
        """
        count = self._pages.match(keys) if keys else 0
        if self._states is None:
            return keys[:count], []
        depth = self._states.deepest(states[: num_with_pages + count])
        return keys[: max(0, depth - num_with_pages)], states[:depth]

    def _begin(self, fetch: _Fetch) -> bool:
        """Reserve pages and start to fill them. Returns False if too few are free."""
        fetch.table = self._pool.reserve(len(fetch.keys))
        if fetch.table is None:
            return False
        if not fetch.keys:
            fetch.loads = Future()
            fetch.loads.set_result([])
            return True
        fetch.number, fetch.loads = self._pages.receive(
            fetch.keys, fetch.table, waits=fetch.request.awaits_pages
        )
        return True

    def _has_state(self, fetch: _Fetch) -> bool:
        """Receive the state of a fetch whose pages have arrived. Returns False until it has ended.

        If the best state may still be announced, wait for it. Then, or if it does not arrive,
        receive the deepest state that is announced.
        """
        states = fetch.states
        if states.since is None:
            states.since = self._clock()
            arrived = fetch.num_loaded
            states.keys = states.keys[: states.num_with_pages + arrived]
            states.may_come = arrived == len(fetch.keys)
        if states.load is not None:
            if not states.load.done():
                return False
            if states.load.result() == [True]:
                return True
            self._snapshots.give_up(states.slot)
            states.load = states.slot = None
            states.keys = states.keys[: states.keys.index(states.key)]
            states.may_come = False
        waits = states.may_come and fetch.request.awaits_pages
        depth = len(states.keys)
        if depth and not waits:
            depth = self._states.deepest(states.keys)
        if not depth:
            return True
        states.slot = self._snapshots.reserve()
        if states.slot is None:
            return self._clock() - states.since > ROOM_SECONDS
        states.key = states.keys[depth - 1]
        states.number, states.load = self._states.receive([states.key], [states.slot], waits=waits)
        return False

    def _cancel(self, fetch: _Fetch) -> None:
        """Make a fetch that has begun end soon."""
        self._pages.cancel(fetch.number)
        if fetch.states.load is not None:
            self._states.cancel(fetch.states.number)

    def _settle(self, fetch: _Fetch) -> None:
        """Insert the pages and the state that have arrived into the prefix cache."""
        count, states = fetch.num_loaded, fetch.states
        if count < len(fetch.keys):
            logger.info(
                "%d of %d KV pages of %s arrived; computing the others",
                *(count, len(fetch.keys), fetch.request.request_id),
            )
        self._pool.settle_(fetch.table, fetch.keys[:count])
        if states.slot is not None and states.load.result() == [True]:
            self._snapshots.fill(states.key, states.slot, fetch.request)
        elif self._states is not None:
            if states.slot is not None:
                self._snapshots.give_up(states.slot)
            logger.info("No state of %s arrived; computing it", fetch.request.request_id)
            count = 0  # pages are useful only up to a state
        self._num_hits += count * self._pool.page_size

    def _finish(self, fetch: _Fetch, *, queues: bool = True) -> None:
        """Queue a request whose fetch has ended, and the requests that wait for the same pages."""
        del self._fetches[fetch.request]
        if queues:
            self._scheduler.add(fetch.request)
        for request, first in list(self._followers.items()):
            if first == fetch.first:
                del self._followers[request]
                if not self._fetch(request):
                    self._scheduler.add(request)
