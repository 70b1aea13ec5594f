"""PageSender: copies a rank's pages to its transfer buffer, layer by layer while others compute.

Before a step the engine names the pages that the step completes. Each layer's attention calls
`send_layer` once the layer's keys are written; on a GPU the copy then runs on a stream of its own,
and the number of complete layers is written to the index in the order of that stream. After a step
in a CUDA graph, `send_rest` copies all layers.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from qserve.kv_transfer.peer.layout import widened
from qserve.kv_transfer.peer.memory import BufferMemory
from qserve.kv_transfer.peer.slot_table import LAYER_BITS, SlotTable
from qserve.model.cache_spec import Cache

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Batch:
    """Pages that the next step, or the current one, completes."""

    slots: list[slice]  # runs of slots that they are copied to
    rows: list[slice]  # of the pages, for each run
    pages_N: torch.Tensor  # int64, on the device
    words_L: torch.Tensor  # int64, on the device: progress after each layer
    num_sent: int = 0  # layers


class PageSender:
    """One rank's buffer. Only the thread that launches steps calls the methods."""

    def __init__(
        self,
        index: SlotTable,
        memory: BufferMemory,
        device: torch.device,
        caches: Callable[[], Sequence[Cache]],
    ) -> None:
        """`index`: of `memory`. `caches`: of all layers, as they are now."""
        self._memory, self._device, self._caches = memory, device, caches
        self._index, facts = index, index.facts
        self._regions = [
            tensor.view(memory.bytes_X[start : start + facts.num_slots * tensor.num_bytes])
            for start, tensor in zip(facts.offsets, facts.tensors, strict=False)
        ]
        self._layer_ends = facts.layer_ends
        self._known: dict[bytes, int] = {}  # key -> page number
        self._num_batches = 0
        self._batches: list[_Batch] = []  # of the step that is launched next, or is being launched
        self._progress_S = torch.from_numpy(self._index.progress)
        self._stream = self._done = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            _register(self._progress_S)

    @property
    def num_slots(self) -> int:
        return self._index.facts.num_slots

    def has(self, key: bytes) -> bool:
        """True if the buffer has the page, or is about to."""
        number = self._known.get(key)
        return number is not None and self._index.is_valid(number)

    def begin(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Announce pages that the step that is launched next completes; up to `num_slots`."""
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
        """True if the step that is launched next, or is being launched, completes pages."""
        return bool(self._batches)

    def wait_for_last(self) -> None:
        """Let the device finish the copies of the last step before the pages may change."""
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
            self._done = None

    def send_layer(self, cache: Cache) -> None:
        """Copy a layer whose keys are written, if it is the next one."""
        for batch in self._batches:
            layers = self._layers
            if batch.num_sent < len(layers) and layers[batch.num_sent] is cache:
                self._send(batch, cache)

    def send_rest(self) -> None:
        """Copy the layers that are left, after the step."""
        if not self._batches:
            return
        for batch in self._batches:
            for cache in self._layers[batch.num_sent :]:
                self._send(batch, cache)
        self._batches.clear()
        if self._stream is not None:
            self._done = torch.cuda.Event()
            self._done.record(self._stream)

    def forget_failed(self) -> None:
        """Drop the pages of a step that failed."""
        if self._batches:
            self._index.invalidate()
            self._known.clear()
            self._batches.clear()

    @property
    def _layers(self) -> list[Cache]:
        """Caches that have pages of their own."""
        return [each for each in self._caches() if each.page_tensors]

    def close(self) -> None:
        """Remove the buffer; readers see that its writer is gone."""
        if self._stream is not None:
            self._stream.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self._progress_S.data_ptr())
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
                # on a GPU a copy to the host's memory: it follows those of the layer
                count = slots.stop - slots.start
                self._progress_S[slots].copy_(word.repeat(count), non_blocking=True)


def _register(tensor: torch.Tensor) -> None:
    """Let the device write to host memory without blocking the host."""
    from qkernels.collective.cuda_ipc import register_host
    from qkernels.collective.peer_memory import PeerAccessError

    try:
        register_host(tensor)
    except PeerAccessError as error:
        logger.warning("KV peer: copies to the index block the host: %s", error)
