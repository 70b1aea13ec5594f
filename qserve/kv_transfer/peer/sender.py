"""PageSender: copies a rank's pages to its transfer buffer, layer by layer during the step.

Before a step the engine names the pages that the step completes. The attention of each layer calls
`send_layer` after the layer's keys are written. On a GPU the copy then runs on a separate stream,
and the number of complete layers is written to the index in the order of that stream. After a step
in a CUDA graph, `send_rest` copies all layers. A drafter's layers are copied after sampling.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from qkernels.collective.cuda_ipc import register_host, unregister_host
from qkernels.collective.peer_memory import PeerAccessError
from qserve.kv_transfer.peer.layout import widened
from qserve.kv_transfer.peer.memory import BufferMemory
from qserve.kv_transfer.peer.slot_table import LAYER_BITS, SlotTable
from qserve.model.cache_spec import Cache

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Batch:
    """Pages that the next or the current step completes."""

    slots: list[slice]  # ranges of slots to which the pages are copied
    rows: list[slice]  # for each range, its pages
    pages_N: torch.Tensor  # int64, on the device
    words_L: torch.Tensor  # int64, on the device: progress word after each layer
    num_sent: int = 0  # number of copied layers


class PageSender:
    """Fills one rank's buffer. Only the thread that launches steps may call the methods."""

    def __init__(
        self,
        index: SlotTable,
        memory: BufferMemory,
        device: torch.device,
        caches: Callable[[], Sequence[Cache]],
    ) -> None:
        """`index`: slot table of `memory`. `caches`: returns the current caches of all layers."""
        self._memory, self._device, self._caches = memory, device, caches
        self._index, facts = index, index.facts
        self._regions = [
            tensor.view(memory.bytes_X[start : start + facts.num_slots * tensor.num_bytes])
            for start, tensor in zip(facts.offsets, facts.tensors, strict=False)
        ]
        self._layer_ends = facts.layer_ends
        self._known: dict[bytes, int] = {}  # key -> page number
        self._num_batches = 0
        self._batches: list[_Batch] = []  # for the step that is launched next or now
        self._progress_S = torch.from_numpy(self._index.progress)
        self._stream = self._done = None
        self._is_registered = False
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._is_registered = _register(self._progress_S)

    @property
    def num_slots(self) -> int:
        return self._index.facts.num_slots

    def has(self, key: bytes) -> bool:
        """Return True if the buffer has the page, or will have it after the next step."""
        number = self._known.get(key)
        return number is not None and self._index.is_valid(number)

    def begin(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Announce the pages, up to `num_slots`, that the next launched step completes."""
        self._num_batches += 1
        count = len(keys)
        first = self._index.begin(list(keys), self._num_batches)
        self._known.update(zip(keys, range(first, first + count), strict=True))
        if len(self._known) > 2 * self.num_slots:
            self._known = {key: n for key, n in self._known.items() if self._index.is_valid(n)}
        start = first % self.num_slots
        until = min(count, self.num_slots - start)
        rows, slots = [slice(0, until)], [slice(start, start + until)]
        if until < count:
            rows.append(slice(until, count))
            slots.append(slice(0, count - until))
        words = [
            self._num_batches << LAYER_BITS | layer for layer in range(len(self._layer_ends) + 1)
        ]
        self._batches.append(
            _Batch(
                slots=slots,
                rows=rows,
                pages_N=self._to_device(pages),
                words_L=self._to_device(words),
            )
        )

    @property
    def is_sending(self) -> bool:
        """True if the step that is launched next or now completes announced pages."""
        return bool(self._batches)

    def wait_for_last(self) -> None:
        """Make the device finish the copies of the last step before pages change."""
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
            self._done = None

    def send_layer(self, cache: Cache) -> None:
        """Copy a layer whose keys are written, if it is the next layer to copy."""
        for batch in self._batches:
            layers = self._layers
            if batch.num_sent < len(layers) and layers[batch.num_sent] is cache:
                self._send(batch, cache)

    def send_rest(self, *, leaves: int = 0) -> None:
        """Copy the remaining layers, after the step.

        `leaves`: number of last layers that are not written yet; a later call copies them.
        """
        if not self._batches:
            return
        layers = self._layers
        for batch in self._batches:
            for cache in layers[batch.num_sent : len(layers) - leaves]:
                self._send(batch, cache)
        if leaves:
            return
        self._batches.clear()
        if self._stream is not None:
            self._done = torch.cuda.Event()
            self._done.record(self._stream)

    def forget_failed(self) -> None:
        """Invalidate the buffer after a step failed."""
        if self._batches:
            self._index.invalidate()
            self._known.clear()
            self._batches.clear()

    @property
    def _layers(self) -> list[Cache]:
        """The caches that have pages."""
        return [each for each in self._caches() if each.page_tensors]

    def close(self) -> None:
        """Remove the buffer. Readers notice that the writer is gone."""
        if self._stream is not None:
            self._stream.synchronize()
        if self._is_registered:
            unregister_host(self._progress_S)
        self._regions.clear()
        del self._progress_S
        self._index.close()
        self._memory.close()

    def _to_device(self, numbers: Sequence[int]) -> torch.Tensor:
        tensor = torch.from_numpy(np.asarray(numbers, np.int64))
        if self._stream is not None:
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)

    def _send(self, batch: _Batch, cache: Cache) -> None:
        first = self._layer_ends[batch.num_sent - 1] if batch.num_sent else 0
        batch.num_sent += 1
        context = contextlib.nullcontext()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            batch.pages_N.record_stream(self._stream)
            batch.words_L.record_stream(self._stream)
            context = torch.cuda.stream(self._stream)
        with context:
            for region, tensor in zip(self._regions[first:], cache.page_tensors, strict=False):
                region, tensor = widened(region, tensor)
                pages = tensor[batch.pages_N]
                for slots, rows in zip(batch.slots, batch.rows, strict=True):
                    region[slots].copy_(pages[rows])
            word = batch.words_L[batch.num_sent]
            for slots in batch.slots:
                # On a GPU this is a copy to host memory, which runs after the layer's copies.
                count = slots.stop - slots.start
                self._progress_S[slots].copy_(word.repeat(count), non_blocking=True)


def _register(tensor: torch.Tensor) -> bool:
    """Register host memory, so that the device can write to it without blocking the host.

    Returns False if the driver refuses, as it does for some kinds of shared memory.
    """
    try:
        register_host(tensor)
    except PeerAccessError as error:
        logger.warning("KV peer: copies to the page index block the host: %s", error)
        return False
    return True
