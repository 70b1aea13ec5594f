"""Memory of a loaded model's tensors, given back while the model sleeps.

The storages of tensors are emptied and filled again; the tensors themselves stay, so that every
module and every view of them is as before. Addresses change.
"""

from collections.abc import Iterable

import torch

from qserve.model.resident.host_memory import HostMemory


def storages_of(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages of tensors, each once."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found.setdefault(storage._cdata, storage)
    return list(found.values())


class SleepingMemory:
    """Storages without memory, and copies of their contents on the host if those are kept."""

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        *,
        keeps: bool,
        moves: bool = False,
        host: HostMemory | None = None,
    ) -> None:
        """Free the memory of all storages. `keeps`: their contents are copied to `host`, or to
        memory of their own.

        `moves`: free storages whose contents are kept, also on a CPU, whose memory is the host's.
        Storages that torch cannot resize, such as mapped files, stay as they are. Where the host
        has no room, raises torch's error, and all is as before.
        """
        self.num_bytes = 0  # given back
        self.keeps = keeps
        self._host = host
        self._emptied: list[tuple[torch.UntypedStorage, int, torch.Tensor | None]] = []
        try:
            for storage in storages_of(tensors):
                is_freed = storage.device.type == "cuda" or moves or not keeps
                if storage.nbytes() and storage.resizable() and is_freed:
                    self._empty(storage)
        except BaseException:
            self.restore()  # there was no room on the host
            raise
        if any(storage.device.type == "cuda" for storage, *_ in self._emptied):
            torch.cuda.synchronize()  # the copies are whole

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
        """Allocate the memory again, and fill it with what was kept; else it holds zeros.

        Raises torch's error, with all memory given back, where the device has not enough.
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
            torch.cuda.synchronize()  # the host's copies are reused next
        self._emptied = []


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A tensor over all of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
