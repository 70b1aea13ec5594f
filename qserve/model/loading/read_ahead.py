"""ReadAhead: moves tensors of a checkpoint to a device, and reads the next layer's meanwhile.

Reading releases the interpreter lock, so disk reads (or copies from the page cache) and GPU work
overlap.
"""

from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from formats.checkpoint import CheckpointReader

# One thread copies from the page cache at a quarter of the memory bandwidth.
NUM_THREADS = 4


class ReadAhead:
    """Reader whose tensors are moved to a device. `expect` announces the next ones."""

    def __init__(self, reader: CheckpointReader, device: torch.device) -> None:
        self._reader, self._device = reader, device
        self._threads: ThreadPoolExecutor | None = None
        self._expected: dict[str, Future[torch.Tensor]] = {}

    def expect(self, prefix: str, without: Collection[str] = ()) -> None:
        """Begin to read all tensors with this prefix. They stay on the host until `get`.

        `without`: tensors, and modules whose tensors, are left out.
        """
        if self._threads is None:
            self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="read-ahead")
        for name in self._reader.entries:
            if not name.startswith(prefix) or name in self._expected:
                continue
            if name not in without and name.rpartition(".")[0] not in without:
                self._expected[name] = self._threads.submit(self._reader.get, name)

    def get(self, name: str) -> torch.Tensor:
        """One tensor, on the device. Raises CheckpointError."""
        expected = self._expected.pop(name, None)
        tensor = self._reader.get(name) if expected is None else expected.result()
        return tensor.to(self._device)

    def rows(self, name: str, numbers: Sequence[int]) -> torch.Tensor:
        """Some rows of a tensor, on the device, in rising order; the others are not read."""
        entry, runs = self._reader.entries[name], []
        for number in numbers:
            if runs and runs[-1][1] == number:
                runs[-1][1] = number + 1
            else:
                runs.append([number, number + 1])
        return torch.cat([entry.rows(start, stop) for start, stop in runs]).to(self._device)

    def close(self) -> None:
        """Drop tensors that were expected but never used."""
        self._expected.clear()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
