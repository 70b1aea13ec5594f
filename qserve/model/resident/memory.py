"""SleepingMemory: frees the memory of a loaded model's tensors while the model sleeps.

The storages of the tensors are resized to 0 and filled again later. The tensor objects stay, so
modules and views remain valid, but addresses change.
"""

from collections.abc import Iterable

import torch

from qserve.model.resident.host_memory import HostMemory


def storages_of(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return the distinct storages of tensors."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found.setdefault(storage._cdata, storage)
    return list(found.values())


class SleepingMemory:
    """Storages whose memory is freed, with copies of their contents on the host if kept."""

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        *,
        keeps: bool,
        moves: bool = False,
        host: HostMemory | None = None,
    ) -> None:
        """Free the memory of all storages.

        `keeps`: copy the contents to `host`, or to new memory if that is None. `moves`: also free
        CPU storages whose contents are kept. Storages that torch cannot resize, such as mapped
        files, are not freed. If the host lacks memory, everything is restored and torch's error is
        raised.
        """
        self.num_bytes = 0  # number of freed bytes
        self.keeps = keeps
        self._host = host
        self._emptied: list[tuple[torch.UntypedStorage, int, torch.Tensor | None]] = []
        try:
            for storage in storages_of(tensors):
                is_freed = storage.device.type == "cuda" or moves or not keeps
                if storage.nbytes() and storage.resizable() and is_freed:
                    self._empty(storage)
        except BaseException:
            self.restore()  # the host lacks memory
            raise
        if any(storage.device.type == "cuda" for storage, *_ in self._emptied):
            torch.cuda.synchronize()  # wait until the copies are complete

    def _empty(self, storage: torch.UntypedStorage) -> None:
        size, kept = storage.nbytes(), None
        if self.keeps:
            own = self._host is None
            kept = torch.empty(size, dtype=torch.uint8) if own else self._host.take(size)
            kept.copy_(bytes_of(storage), non_blocking=True)
        storage.resize_(0)
        self.num_bytes += size
        self._emptied.append((storage, size, kept))

    def restore(self) -> None:
        """Allocate the memory again, and fill it with the kept contents, or with zeros.

        If the device lacks memory, all memory is freed again and torch's error is raised.
        """
        done: list[torch.UntypedStorage] = []
        try:
            for storage, size, kept in self._emptied:
                done.append(storage)
                storage.resize_(size)
                own = bytes_of(storage)
                if kept is None:
                    own.zero_()
                else:
                    own.copy_(kept, non_blocking=True)
        except BaseException:
            for storage in done:
                storage.resize_(0)
            raise
        if any(storage.device.type == "cuda" for storage in done):
            torch.cuda.synchronize()  # the host memory of the copies may be reused next
        self._emptied = []


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a byte tensor over a whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
