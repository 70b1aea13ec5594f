"""PageReceiver: copies pages of other engines to this rank's pages, layer by layer.

One thread serves all requests. It polls the indexes of the other engines. As soon as a layer of a
page is complete there, the thread copies the layer, while the other engine computes the next ones.
A page counts as loaded if all its layers were copied and its slot was not reused meanwhile.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from qserve.kv_transfer.peer.layout import BufferFacts, Source, widened
from qserve.kv_transfer.peer.peers import Peer, Peers
from qserve.model.cache_spec import Cache

POLL_SECONDS = 0.0003
IDLE_SECONDS = 1.0  # longest wait without requests

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class _Run:
    """Pages of a job that are in consecutive slots of a peer and were copied there in one batch."""

    peer: Peer
    index: int  # index of the first page among the job's pages
    count: int
    number: int  # number of the first page in the peer's buffer
    batch: int
    num_layers: int = 0  # number of layers that were copied here

    def takes(self, peer: Peer, number: int, batch: int) -> bool:
        """Return True if a page continues the run."""
        follows = number == self.number + self.count and number % peer.num_slots
        return bool(follows) and (peer, batch, 0) == (self.peer, self.batch, self.num_layers)

    @property
    def is_valid(self) -> bool:
        """True if none of the slots was reused. The first slot is reused before the others."""
        return self.peer.is_valid(self.number)


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    """Pages of one request that are being received."""

    keys: list[bytes]
    pages_N: torch.Tensor
    waits: bool  # True: also wait for pages that are not announced yet
    news: float  # time of the last progress
    future: Future = field(default_factory=Future)
    after: object = None  # event after work that may still write to these pages
    runs: list[_Run] = field(default_factory=list)  # runs of the announced pages
    is_cancelled: bool = False

    @property
    def num_located(self) -> int:
        """Number of leading pages that were announced."""
        return self.runs[-1].index + self.runs[-1].count if self.runs else 0


class PageReceiver:
    """Receives pages of other engines for one rank. Only the engine's thread may call methods."""

    def __init__(
        self,
        peers: Peers,
        ours: BufferFacts,
        device: torch.device,
        caches: Callable[[], Sequence[Cache]],
        *,
        patience: float,
        name: str = "kv-receive",
    ) -> None:
        """`patience`: seconds that a request waits without progress."""
        self._peers, self._device, self._caches = peers, device, caches
        self._patience, self._layer_ends = patience, ours.layer_ends
        self._tensors = ours.tensors
        self._jobs: dict[int, _Job] = {}
        self._changed = threading.Condition()
        self._looking = threading.Lock()  # held while using `_peers`
        self._is_closed = False
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            peers.finish_copies = self._stream.synchronize
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def match(self, keys: Sequence[bytes]) -> int:
        """Return the number of leading pages that one engine has announced."""
        with self._looking:
            self._peers.refresh()
            return max((_leading(peer, keys) for peer in self._peers), default=0)

    def deepest(self, keys: Sequence[bytes]) -> int:
        """Return the number of keys up to the last one that an engine has announced."""
        with self._looking:
            self._peers.refresh()
            peers = list(self._peers)
            return next(
                (n for n in range(len(keys), 0, -1) if any(p.find(keys[n - 1]) for p in peers)), 0
            )

    @property
    def num_peers(self) -> int:
        """Number of engines that are alive and whose pages can be used."""
        with self._looking:
            self._peers.refresh(now=True)
            return len(self._peers)

    def receive(
        self, number: int, keys: Sequence[bytes], pages: Sequence[int], *, waits: bool
    ) -> Future:
        """Fill unused pages. The future's result says for each page if it was loaded.

        `waits`: also wait for pages that no engine has announced yet.
        """
        pages_N = torch.tensor(pages, dtype=torch.int64)
        if self._stream is not None:
            pages_N = pages_N.pin_memory().to(self._device, non_blocking=True)
        job = _Job(keys=list(keys), pages_N=pages_N, waits=waits, news=time.monotonic())
        if self._stream is not None:
            job.after = torch.cuda.Event()
            job.after.record(torch.cuda.current_stream(self._device))
        with self._changed:
            self._jobs[number] = job
            self._changed.notify()
        return job.future

    def expect_no_more(self, number: int) -> None:
        """Stop the call `number` of `receive` from waiting for pages that are not announced.

        An unknown number is ignored.
        """
        with self._changed:
            job = self._jobs.get(number)
            if job is not None:
                job.waits = False

    def cancel(self, number: int) -> None:
        """Make the call `number` of `receive` end soon. An unknown number is ignored."""
        with self._changed:
            job = self._jobs.get(number)
            if job is not None:
                job.is_cancelled = True

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(10)
        if not self._thread.is_alive():
            self._peers.close()

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while True:
            with self._changed:
                while not self._jobs and not self._is_closed:
                    self._changed.wait(IDLE_SECONDS)
                # `waits` is read before the peers' announcements, so that none is missed
                jobs = [(n, job, job.waits) for n, job in self._jobs.items()]
                closed = self._is_closed
            if closed:
                self._end_all()
                return
            moved = False
            try:
                with self._looking, torch.inference_mode():
                    self._peers.refresh()
                    for number, job, waits in jobs:
                        moved |= self._advance(number, job, waits)
            except Exception:
                logger.exception("KV pages of other engines cannot be read; they are computed")
                self._end_all()
            if not moved:
                time.sleep(POLL_SECONDS)

    def _advance(self, number: int, job: _Job, waits: bool) -> bool:
        """Copy the layers that have become complete. Returns True if there were any."""
        self._locate(job)
        moved = False
        for run in job.runs:
            ready = run.peer.num_layers(run.number, run.count, run.batch)
            if ready <= run.num_layers:
                continue
            try:
                self._copy(job, run, ready)
            except RuntimeError as error:  # an error of the driver, or out of memory
                self._peers.drop(run.peer, f"cannot be read ({error})")
                self._forget_dead(job)
                break
            run.num_layers, job.news, moved = ready, time.monotonic(), True
        if self._is_over(job, waits):
            self._end(number, job)
        return moved

    def _locate(self, job: _Job) -> None:
        """Find the pages that were announced since the last call."""
        self._forget_dead(job)
        for index in range(job.num_located, len(job.keys)):
            for peer in self._peers:
                if (found := peer.find(job.keys[index])) is not None:
                    break
            else:
                return  # a later page is useless without this one
            job.news = time.monotonic()
            if job.runs and job.runs[-1].takes(peer, *found):
                job.runs[-1].count += 1
            else:
                number, batch = found
                job.runs.append(_Run(peer=peer, index=index, count=1, number=number, batch=batch))

    def _forget_dead(self, job: _Job) -> None:
        """Drop the first run of a dead engine and all later runs.

        Other engines may have their pages.
        """
        alive = set(self._peers)
        for place, run in enumerate(job.runs):
            if run.peer not in alive:
                del job.runs[place:]
                return

    def _copy(self, job: _Job, run: _Run, ready: int) -> None:
        """Copy the new layers of a run. `ready`: number of layers that are complete."""
        tensors = [each for cache in self._caches() for each in cache.page_tensors]
        start = self._layer_ends[run.num_layers - 1] if run.num_layers else 0
        slot = run.number % run.peer.num_slots
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if job.after is not None:
                self._stream.wait_event(job.after)
                job.after = None
            pages_N = job.pages_N[run.index : run.index + run.count]
            numbers = range(start, self._layer_ends[ready - 1])
            for rank, memory in enumerate(run.peer.memories):
                taken = {n: [s for s in run.peer.sources[n] if s.rank == rank] for n in numbers}
                wanted = [number for number, parts in taken.items() if parts]
                for number, rows, found in memory.read(wanted, slot, run.count):
                    for source in taken[number]:
                        axis = self._tensors[number].axis
                        _write(tensors[number], pages_N[rows], found, axis, source)

    def _is_over(self, job: _Job, waits: bool) -> bool:
        left = [run for run in job.runs if run.num_layers < len(self._layer_ends)]
        is_whole = job.num_located == len(job.keys)
        if job.is_cancelled or (is_whole and not left):
            return True
        if time.monotonic() - job.news > self._patience:
            logger.warning(
                "KV pages of another engine did not arrive within %g s: they are computed",
                self._patience,
            )
            return True
        if left:
            return not left[0].is_valid  # if overwritten, it will not arrive
        return not waits or not len(self._peers)

    def _end(self, number: int, job: _Job) -> None:
        """Wait for the device's copies, and resolve the future."""
        if self._stream is not None:
            self._stream.synchronize()
        loaded = [False] * len(job.keys)
        usable = {peer for peer in {run.peer for run in job.runs} if self._peers.renew(peer)}
        for run in job.runs:
            is_whole = run.num_layers == len(self._layer_ends)
            if not is_whole or run.peer not in usable or not run.is_valid:
                break
            loaded[run.index : run.index + run.count] = [True] * run.count
        with self._changed:
            self._jobs.pop(number, None)
        job.future.set_result(loaded)

    def _end_all(self) -> None:
        with self._changed:
            jobs, self._jobs = self._jobs, {}
        if self._stream is not None:
            with contextlib.suppress(RuntimeError):
                self._stream.synchronize()
        for job in jobs.values():
            if not job.future.done():
                job.future.set_result([False] * len(job.keys))


def _leading(peer: Peer, keys: Sequence[bytes]) -> int:
    for count, key in enumerate(keys):
        if peer.find(key) is None:
            return count
    return len(keys)


def _write(
    tensor: torch.Tensor,
    pages_N: torch.Tensor,
    found: torch.Tensor,
    axis: int | None,
    source: Source,
) -> None:
    """Write the heads of one source to pages."""
    if axis is not None:
        found = found.narrow(axis + 1, source.start, source.count)
        tensor = tensor.narrow(axis + 1, source.target, source.count)
    tensor, found = widened(tensor, found)
    tensor[pages_N] = found
