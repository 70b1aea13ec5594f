"""ReadAhead: moves tensors of a checkpoint to a device, and reads the next layer's meanwhile.

Reading releases the interpreter lock, so disk reads (or copies from the page cache) and GPU work
overlap.
"""

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

    def expect(self, prefix: str) -> None:
        """Begin to read all tensors with this prefix. They stay on the host until `get`."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="read-ahead")
        for name in self._reader.entries:
            if name.startswith(prefix) and name not in self._expected:
                self._expected[name] = self._threads.submit(self._reader.get, name)

    def get(self, name: str) -> torch.Tensor:
        """One tensor, on the device. Raises CheckpointError."""
        expected = self._expected.pop(name, None)
        tensor = self._reader.get(name) if expected is None else expected.result()
        return tensor.to(self._device)

    def close(self) -> None:
        """Drop tensors that were expected but never used."""
        self._expected.clear()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
