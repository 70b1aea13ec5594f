"""Copies of KV pages between the device and the host's memory. Knows pages and slots, no requests.

A page of all layers is one piece of host memory: it travels in one transfer, not in two for each
layer. On a GPU transfers run on a stream of their own: what is stored is first gathered into a
buffer there, so steps need not wait for it; a step that needs loaded pages waits for them alone.
Legend: N pages of one transfer, P pages of the device, S slots, F bytes of a page in all layers.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import numpy as np
import torch

from qkernels.attention.cache import PagedKv
from qserve.engine.host_pages import PageMoves
from qserve.engine.out_of_memory import ran_out
from qserve.engine.transfer import HostCopy, to_device

logger = logging.getLogger(__name__)

# A page of an 8B model is 2 MiB: the buffers on the device stay below 64 MiB.
PAGES_AT_ONCE = 32


class PageCopies:
    """The slots, and the way to and from them."""

    def __init__(self, caches: Sequence[PagedKv], num_slots: int, device: torch.device) -> None:
        """`caches`: of all layers. Takes the memory of `num_slots` pages on the host."""
        self._device = device
        self._parts = [part for cache in caches for part in _parts(cache)]
        self._sizes = [part[0].numel() * part.itemsize for part in self._parts]
        is_cuda = device.type == "cuda"
        self._slots_SF = torch.empty(
            num_slots, sum(self._sizes), dtype=torch.uint8, pin_memory=is_cuda
        )
        self._stream = torch.cuda.Stream(device) if is_cuda else None

    def store(self, moves: PageMoves) -> None:
        """Store pages before whatever is launched next. Waits only where memory ran out."""
        for pages, slots in _batches(moves.stored_pages, moves.stored_slots):
            self._store(pages, slots)

    def load(self, moves: PageMoves) -> None:
        """Load pages before whatever is launched next. Waits only where memory ran out."""
        for pages, slots in _batches(moves.loaded_pages, moves.loaded_slots):
            self._load(pages, slots)

    def read(self, pages: Sequence[int]) -> HostCopy:
        """Copy pages to memory of their own, as they are after all that was launched so far."""
        index = to_device(np.asarray(pages, np.int64), self._device)
        buffer_NF = torch.cat([_bytes(part[index]) for part in self._parts], dim=1)
        with self._transfers(buffer_NF):
            return HostCopy(buffer_NF)

    def slot(self, number: int) -> memoryview:
        """A slot's bytes, for who has reserved it, and has waited for `idle`."""
        return memoryview(self._slots_SF[number].numpy())

    def idle(self) -> Callable[[], None]:
        """What waits for the copies between slots and device that are under way now."""
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
            buffer_NF = torch.cat([_bytes(part[index]) for part in self._parts], dim=1)
        except (RuntimeError, MemoryError) as error:
            self._wait_where_memory_ran_out(error)
            for page, slot in zip(pages.tolist(), slots.tolist(), strict=True):
                for part, piece in zip(self._parts, self._pieces(slot), strict=True):
                    piece.copy_(_bytes(part[page : page + 1])[0])
            return
        with self._transfers(buffer_NF):
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
                for part, piece in zip(self._parts, self._pieces(slot), strict=True):
                    part[page].copy_(piece.clone().view(part.dtype).view(part.shape[1:]))
            return
        with self._transfers(buffer_NF):
            for row, slot in enumerate(slots.tolist()):
                buffer_NF[row].copy_(self._slots_SF[slot], non_blocking=True)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        for part, piece in zip(self._parts, buffer_NF.split(self._sizes, dim=1), strict=True):
            part[index] = piece.contiguous().view(part.dtype).view(-1, *part.shape[1:])

    def _pieces(self, slot: int) -> tuple[torch.Tensor, ...]:
        """A slot's bytes of each part."""
        return self._slots_SF[slot].split(self._sizes)

    def _wait_where_memory_ran_out(self, error: Exception) -> None:
        """Be ready to copy page by page, which needs no buffer. Raises any other error.

        A page that is not copied would be lost, and a step that reads it would read another.
        """
        if not ran_out(error):
            raise error
        logger.warning("No memory to copy KV pages together: each is copied alone, and waited for")
        if self._stream is not None:
            self._stream.synchronize()

    def _transfers(self, buffer: torch.Tensor) -> object:
        """The stream of transfers as a context, behind what was launched for `buffer` so far."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        buffer.record_stream(self._stream)
        return torch.cuda.stream(self._stream)


def copy_pages(caches: Sequence[PagedKv], moves: PageMoves, device: torch.device) -> None:
    """Copy pages on the device, before whatever is launched next."""
    if not len(moves.copied_to):
        return
    source, target = (to_device(pages, device) for pages in (moves.copied_from, moves.copied_to))
    for cache in caches:
        for part in _parts(cache):
            part[target] = part[source]


def _parts(cache: PagedKv) -> Iterator[torch.Tensor]:
    """What a cache holds of each page. Scales of the checkpoint are the same for all."""
    for pages in (cache.k_pages, cache.v_pages):
        yield pages.view(torch.uint8)  # float8 has no indexed copies everywhere
    if cache.k_scales is not None and not cache.static_scales:
        yield from (cache.k_scales, cache.v_scales)


def _bytes(part_N: torch.Tensor) -> torch.Tensor:
    """[N, bytes] of [N, ...]."""
    # flat first: the last dimension may have one entry, and any stride
    return part_N.contiguous().flatten().view(torch.uint8).view(len(part_N), -1)


def _batches(*arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    for start in range(0, len(arrays[0]), PAGES_AT_ONCE):
        yield tuple(array[start : start + PAGES_AT_ONCE] for array in arrays)
