"""Copies of KV pages and states between device and host memory, and on the device.

All layers of a page are one block of host memory and take one transfer instead of two per layer.
The same holds for a slot of states, which is called a page here too. On a GPU transfers run on a
separate stream. Stored pages are first gathered into a buffer on the device, so steps do not wait
for the transfer. A step that needs loaded pages waits only for these.

N: pages of one transfer. S: slots. F: bytes of a page in all layers.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import numpy as np
import torch

from qserve.engine.kv_cache.host_tier import PageMoves
from qserve.engine.kv_cache.state_snapshots import StateMoves
from qserve.engine.runner.out_of_memory import ran_out
from qserve.engine.step.transfer import HostCopy, to_device
from qserve.model.cache_spec import Cache

logger = logging.getLogger(__name__)

# Size of the device buffer. A page of an 8B model is 2 MiB; a slot of states may exceed the buffer.
BUFFER_BYTES = 64 * 2**20
PAGES_AT_ONCE = 32


class PageCopies:
    """Slots of the host tier, and copies between them and the device's pages."""

    def __init__(
        self,
        caches: Sequence[Cache],
        num_slots: int,
        device: torch.device,
        *,
        of_states: bool = False,
    ) -> None:
        """Allocate `num_slots` pages on the host. `caches`: caches of all layers.

        `of_states`: copy slots of states instead of KV pages.
        """
        self._device = device
        tensors = [each.slot_tensors if of_states else each.page_tensors for each in caches]
        self._tensors = [tensor for of_cache in tensors for tensor in of_cache]
        self._sizes = [each[0].numel() * each.itemsize for each in self._tensors]
        is_cuda = device.type == "cuda"
        self._slots_SF = torch.empty(
            num_slots, sum(self._sizes), dtype=torch.uint8, pin_memory=is_cuda
        )
        self._stream = torch.cuda.Stream(device) if is_cuda else None
        at_once = BUFFER_BYTES // max(1, sum(self._sizes))
        self._pages_at_once = min(max(1, at_once), PAGES_AT_ONCE)

    def store(self, moves: PageMoves) -> None:
        """Store pages before the next launch. Waits for the device only if memory runs out."""
        for pages, slots in self._batches(moves.stored_pages, moves.stored_slots):
            self._store(pages, slots)

    def load(self, moves: PageMoves) -> None:
        """Load pages before the next launch. Waits for the device only if memory runs out."""
        for pages, slots in self._batches(moves.loaded_pages, moves.loaded_slots):
            self._load(pages, slots)

    def _batches(self, *arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
        for start in range(0, len(arrays[0]), self._pages_at_once):
            yield tuple(array[start : start + self._pages_at_once] for array in arrays)

    def read(self, pages: Sequence[int]) -> HostCopy | None:
        """Start copying pages to new host memory. The copy runs after all launched work.

        Returns None if memory runs out.
        """
        try:
            index = to_device(np.asarray(pages, np.int64), self._device)
            buffer_NF = torch.cat([_bytes(each[index]) for each in self._tensors], dim=1)
            with self._transfer(buffer_NF):
                return HostCopy(buffer_NF)
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            return None

    def slot(self, number: int) -> memoryview:
        """Return the bytes of a reserved slot. Call the function from `idle` before using them."""
        return memoryview(self._slots_SF[number].numpy())

    def idle(self) -> Callable[[], None]:
        """Return a function that waits for the copies between slots and device started so far."""
        if self._stream is None:
            return lambda: None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event.synchronize

    @property
    def page_bytes(self) -> int:
        return self._slots_SF.shape[1]

    def _store(self, pages: np.ndarray, slots: np.ndarray) -> None:
        try:
            index = to_device(pages, self._device)
            buffer_NF = torch.cat([_bytes(each[index]) for each in self._tensors], dim=1)
        except (RuntimeError, MemoryError) as error:
            self._wait_where_memory_ran_out(error)
            for page, slot in zip(pages.tolist(), slots.tolist(), strict=True):
                for tensor, piece in zip(self._tensors, self._pieces(slot), strict=True):
                    piece.copy_(_bytes(tensor[page : page + 1])[0])
            return
        with self._transfer(buffer_NF):
            for row, slot in enumerate(slots.tolist()):
                self._slots_SF[slot].copy_(buffer_NF[row], non_blocking=True)

    def _load(self, pages: np.ndarray, slots: np.ndarray) -> None:
        width = self._slots_SF.shape[1]
        try:
            index = to_device(pages, self._device)
            buffer_NF = torch.empty(len(pages), width, dtype=torch.uint8, device=self._device)
        except (RuntimeError, MemoryError) as error:
            self._wait_where_memory_ran_out(error)
            for page, slot in zip(pages.tolist(), slots.tolist(), strict=True):
                for tensor, piece in zip(self._tensors, self._pieces(slot), strict=True):
                    tensor[page].copy_(piece.clone().view(tensor.dtype).view(tensor.shape[1:]))
            return
        with self._transfer(buffer_NF):
            for row, slot in enumerate(slots.tolist()):
                buffer_NF[row].copy_(self._slots_SF[slot], non_blocking=True)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        for tensor, piece in zip(self._tensors, buffer_NF.split(self._sizes, dim=1), strict=True):
            # cloned, because a piece may begin at an address that its dtype does not allow
            piece = piece.clone(memory_format=torch.contiguous_format)
            tensor[index] = piece.view(tensor.dtype).view(-1, *tensor.shape[1:])

    def _pieces(self, slot: int) -> tuple[torch.Tensor, ...]:
        """Return the bytes of a slot, one piece per tensor."""
        return self._slots_SF[slot].split(self._sizes)

    def _wait_where_memory_ran_out(self, error: Exception) -> None:
        """Prepare to copy page by page, which needs no buffer. Re-raises any other error.

        Skipping the copy is not possible: a page would be lost, or a step would read a wrong page.
        """
        if not ran_out(error):
            raise error
        logger.warning("No memory to copy KV pages together: copying them one by one")
        if self._stream is not None:
            self._stream.synchronize()

    def _transfer(self, buffer: torch.Tensor) -> object:
        """Context in which work runs on the transfer stream, after the work launched so far."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        buffer.record_stream(self._stream)
        return torch.cuda.stream(self._stream)


def copy_pages(caches: Sequence[Cache], moves: PageMoves, device: torch.device) -> None:
    """Copy pages on the device before the next launch."""
    if not len(moves.copied_to):
        return
    source, target = (to_device(pages, device) for pages in (moves.copied_from, moves.copied_to))
    for cache in caches:
        for tensor in cache.page_tensors:
            tensor[target] = tensor[source]


def copy_states(
    caches: Sequence[Cache],
    moves: StateMoves,
    device: torch.device,
    host: PageCopies | None = None,
) -> None:
    """Copy states in stream order before the next launch. `host`: the slots on the host."""
    hosted = PageMoves(
        stored_pages=moves.stored_from,
        stored_slots=moves.stored_to,
        loaded_slots=moves.loaded_from,
        loaded_pages=moves.loaded_to,
    )
    if host is not None:
        host.store(hosted)
    for source, target in (
        (moves.saved_from, moves.saved_to),
        (moves.restored_from, moves.restored_to),
    ):
        if not len(target):
            continue
        source_N, target_N = to_device(source, device), to_device(target, device)
        for cache in caches:
            for tensor in cache.slot_tensors:
                tensor[target_N] = tensor[source_N]
    if host is not None:
        host.load(hosted)


def _bytes(tensor_N: torch.Tensor) -> torch.Tensor:
    """View [N, ...] as bytes [N, F]."""
    # Flattened first, because a last dimension with one entry may have any stride.
    return tensor_N.contiguous().flatten().view(torch.uint8).view(len(tensor_N), -1)
