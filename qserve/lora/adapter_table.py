"""AdapterTable: the adapters that an engine knows, and the requests that wait for an adapter.

A request is queued in the scheduler when its adapter has a device slot; the adapter keeps the slot
until the request finishes. A request that waits here does not block requests without an adapter or
requests whose adapter has a slot. But after MAX_PASSES requests with an adapter have passed over
the request that has waited longest, no more of them pass until that request has its slot.

The host keeps the most recently used adapters. Others are read again from their folders, in a
thread.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from threading import Event

from formats.errors import InputError, one_line
from qserve.config import EngineConfig
from qserve.lora.adapter import Adapter
from qserve.lora.adapter_slots import AdaptedRequest, AdapterSlots
from qserve.lora.request import LoRARequest, parse_modules
from qserve.lora.shared_adapters import SharedAdapter, SharedAdapters

MAX_PASSES = 16
# How long, and how many, replaced adapters are kept for requests that were made before.
KEPT_SECONDS, MAX_REPLACED = 60.0, 8
MAX_WAIT_SECONDS = 0.01  # longest wait of an engine that has nothing else to do

Read = Callable[[str, Callable[[], bool]], SharedAdapter]
Place = Callable[[int, SharedAdapter], None]
Ready = list[tuple[AdaptedRequest, str | None]]


class AdapterTable:
    """The adapters of one engine."""

    def __init__(
        self,
        read: Read,
        place: Place,
        *,
        num_slots: int,
        num_on_host: int,
        time: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read`: reads an adapter from a folder, or raises InputError; its second argument is a
        function that returns False when nothing waits for the adapter any more. `place`: copies an
        adapter to a slot. `num_on_host`: maximum number of adapters on the host.
        """
        self._read, self._place, self._time = read, place, time
        self._num_on_host = num_on_host
        self.slots = AdapterSlots(num_slots)
        self._known: dict[str, Adapter] = {}
        self._ids: dict[int, str] = {}  # lora_int_id -> name
        self._replaced: list[tuple[Adapter, float]] = []  # (adapter, time to drop it), oldest first
        self._waiting: dict[Adapter, deque[AdaptedRequest]] = {}
        self._num_waiting = 0
        self._num_arrived = 0
        self._arrivals: dict[AdaptedRequest, int] = {}  # request -> number in order of arrival
        self._oldest: AdaptedRequest | None = None  # the oldest request that waits for a slot
        self._num_passes = 0  # number of requests that passed over the oldest
        self._clock = 0
        self._reader: ThreadPoolExecutor | None = None

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all known adapters."""
        return tuple(self._known)

    @property
    def digests(self) -> dict[str, str]:
        """Name -> digest of the weights, for known adapters that were read."""
        return {
            name: adapter.generation for name, adapter in self._known.items() if adapter.generation
        }

    def names_in_use(self) -> tuple[str, ...]:
        return tuple(sorted({adapter.name for adapter in self.slots.in_use()}))

    def names_waited_for(self) -> tuple[str, ...]:
        return tuple(sorted({adapter.name for adapter in self._waiting}))

    def read(self, path: str, is_wanted: Callable[[], bool] = lambda: True) -> SharedAdapter:
        """Read an adapter from a folder. Does not change the table, so any thread may call it.

        Raises InputError, also if `is_wanted` returns False before the end.
        """
        return self._read(path, is_wanted)

    def put(self, name: str, path: str, packed: SharedAdapter, number: int = 0) -> None:
        """Make an adapter available under a name, which may replace another adapter.

        `number`: number of this load. Requests with a lower number were made before the load and
        get the replaced adapter. This way all outputs of one API request, which arrive one by one,
        use the same adapter.
        """
        self.unload(name)
        adapter = Adapter(name=name, path=path, number=number)
        self._known[name] = adapter
        self._keep(adapter, packed)

    def unload(self, name: str) -> None:
        """Remove a name. Its adapter is kept for a while, for requests made before a later load."""
        adapter = self._known.get(name)
        if adapter is None:
            return
        self._forget_replaced()
        self._replaced.append((adapter, self._time() + KEPT_SECONDS))
        most = min(MAX_REPLACED, self._num_on_host)
        for old, _ in self._replaced[:-most]:
            self._let_go(old)
        del self._replaced[:-most]
        self._take_off(name)

    def remove(self, name: str) -> bool:
        """Remove a name. Requests that have the adapter keep it. Returns True if it was known."""
        adapter = self._take_off(name)
        if adapter is not None:
            self._let_go(adapter)
        return adapter is not None

    def find(self, lora: LoRARequest) -> Adapter:
        """Return the adapter that a request asks for. It may not be read yet. Raises InputError."""
        name, number = lora.lora_name, lora.lora_int_id
        if self._ids.get(number, name) != name:
            raise InputError(
                f"adapter {name}",
                f"its id {number} is already used by {self._ids[number]}",
                "use another id",
            )
        adapter = self._known.get(name)
        if adapter is not None and number < adapter.number:
            adapter = self._before(name, number) or adapter
        if adapter is None:
            if not lora.lora_path:
                known = ", ".join(self._known) or "none"
                raise InputError(f"adapter {name}", "unknown", f"known: {known}; or give its path")
            adapter = self._known[name] = Adapter(name=name, path=lora.lora_path)
        elif lora.lora_path not in ("", adapter.path) and number >= adapter.number:
            raise InputError(
                f"adapter {name}",
                f"expected the folder {adapter.path}, found {lora.lora_path}",
                "use another name for another folder",
            )
        self._ids[number] = name
        return adapter

    def add(self, request: AdaptedRequest) -> None:
        """Add a request that waits for its adapter."""
        self._waiting.setdefault(request.adapter, deque()).append(request)
        self._num_arrived += 1
        self._arrivals[request] = self._num_arrived
        self._num_waiting += 1

    def drop(self, request: AdaptedRequest) -> bool:
        """Remove a dropped request. Returns True if it waited here.

        If no other request waits for its adapter, reading the adapter is cancelled.
        """
        if request not in self._arrivals:
            return False
        self._leave(request)
        adapter = request.adapter
        if adapter not in self._waiting and adapter.reading is not None:
            adapter.has_left.set()
            adapter.reading.cancel()
            adapter.reading = None
        return True

    def take_ready(self, *, wait_a_little: bool) -> Ready:
        """Remove and return requests that are done waiting: (request, None or an error message).

        A request without an error has a slot now.
        """
        if not self._waiting:
            return []
        if wait_a_little:
            # Finished futures are left out, because with one of them wait() returns immediately.
            readings = [each.reading for each in self._waiting if each.reading is not None]
            under_way = [reading for reading in readings if not reading.done()]
            wait(under_way, MAX_WAIT_SECONDS, FIRST_COMPLETED)
        ready: Ready = []
        held_back: AdaptedRequest | None = None
        for adapter in sorted(self._waiting, key=self._arrival):
            error = self._fetch(adapter)
            if error is not None:
                ready += [(request, error) for request in self._all_of(adapter)]
            if adapter.packed is None and self.slots.find(adapter) is None:
                continue
            if not self._has_slot(adapter):
                held_back = held_back or self._waiting[adapter][0]
                self._note_oldest(held_back)
                continue
            slot = self.slots.find(adapter)
            while adapter in self._waiting and (held_back is None or self._may_pass()):
                request = self._waiting[adapter][0]
                self._leave(request)
                self.slots.use(slot, request)
                ready.append((request, None))
        if held_back is None:
            self._note_oldest(None)
        return ready

    def _take_off(self, name: str) -> Adapter | None:
        self._ids = {number: each for number, each in self._ids.items() if each != name}
        return self._known.pop(name, None)

    def _let_go(self, adapter: Adapter) -> None:
        """Free an unloaded adapter, unless requests still use it or wait for it."""
        if adapter not in self._waiting:
            self.slots.drop(adapter)
            adapter.packed = None

    def _before(self, name: str, number: int) -> Adapter | None:
        """Return the replaced adapter that had a name when a request with this number was made."""
        self._forget_replaced()
        fits = (a for a, _ in self._replaced if a.name == name and a.number <= number)
        return max(fits, key=_number, default=None)

    def _forget_replaced(self) -> None:
        now = self._time()
        while self._replaced and self._replaced[0][1] <= now:
            self._let_go(self._replaced.pop(0)[0])

    def _arrival(self, adapter: Adapter) -> int:
        return self._arrivals[self._waiting[adapter][0]]

    def _all_of(self, adapter: Adapter) -> Iterator[AdaptedRequest]:
        while adapter in self._waiting:
            request = self._waiting[adapter][0]
            self._leave(request)
            yield request

    def _leave(self, request: AdaptedRequest) -> None:
        waiting = self._waiting[request.adapter]
        waiting.remove(request)
        if not waiting:
            del self._waiting[request.adapter]
        del self._arrivals[request]
        self._num_waiting -= 1

    def _has_slot(self, adapter: Adapter) -> bool:
        """Give an adapter a free slot if it has none. Returns True if it has a slot now."""
        if self.slots.find(adapter) is not None:
            return True
        slot = self.slots.free()
        if slot is None:
            return False
        self.slots.put(slot, adapter)
        self._place(slot, adapter.packed)
        self._forget_unused()
        return True

    def _note_oldest(self, request: AdaptedRequest | None) -> None:
        if request is not self._oldest:
            self._oldest, self._num_passes = request, 0

    def _may_pass(self) -> bool:
        self._num_passes += 1
        return self._num_passes <= MAX_PASSES

    def _fetch(self, adapter: Adapter) -> str | None:
        """Start or finish reading an adapter to the host. Returns an error message on failure."""
        self._clock += 1
        adapter.last_used = self._clock
        if adapter.packed is not None or self.slots.find(adapter) is not None:
            return None
        if adapter.reading is None:
            adapter.reading = self._start_reading(adapter)
        if not adapter.reading.done():
            return None
        reading, adapter.reading = adapter.reading, None
        error = reading.exception()
        if error is None:
            self._keep(adapter, reading.result())
            return None
        if self._known.get(adapter.name) is adapter:  # the next request tries again
            self.remove(adapter.name)
        # Any error concerns only this adapter's requests.
        reason = str(error) if isinstance(error, InputError | OSError) else one_line(error)
        return f"adapter {adapter.name}: {reason}"

    def _start_reading(self, adapter: Adapter) -> Future:
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        has_left = adapter.has_left = Event()
        return self._reader.submit(self._read, adapter.path, lambda: not has_left.is_set())

    def _keep(self, adapter: Adapter, packed: SharedAdapter) -> None:
        self._clock += 1
        adapter.packed, adapter.generation = packed, packed.digest
        adapter.last_used = self._clock
        self._forget_unused()

    def _forget_unused(self) -> None:
        """Drop the least recently used adapters that exceed the host's limit.

        Adapters with a slot or with waiting requests stay. So a dropped adapter, whose folder may
        have other weights when it is read again, has no slot.
        """
        on_host = [each for each in self._known.values() if each.packed is not None]
        needed = {*self.slots.held(), *self._waiting}
        unused = sorted((each for each in on_host if each not in needed), key=_last_used)
        for adapter in unused[: max(0, len(on_host) - self._num_on_host)]:
            adapter.packed = None


def _number(adapter: Adapter) -> int:
    return adapter.number


def _last_used(adapter: Adapter) -> int:
    return adapter.last_used


def make_table(config: EngineConfig, shared: SharedAdapters | None) -> AdapterTable | None:
    """Create the table with the adapters of --lora-modules. Raises InputError.

    Returns None without --enable-lora.
    """
    if shared is None:
        return None
    table = AdapterTable(
        shared.read, shared.place, num_slots=config.max_loras, num_on_host=config.num_cpu_loras
    )
    for lora in parse_modules(config.lora_modules):
        table.put(lora.lora_name, lora.lora_path, shared.read(lora.lora_path))
    return table


def adapters_of(table: AdapterTable | None) -> AdapterTable:
    """Return the table. Raises InputError if it is None."""
    if table is None:
        raise InputError("adapters", "are not enabled", "start the engine with --enable-lora")
    return table
