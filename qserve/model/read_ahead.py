"""ReadAhead: tensors of a checkpoint on a device, those of the next layer read meanwhile.

Reading releases the interpreter lock, so the disk, or the page cache's copies, and the GPU work at
the same time. Knows names, not what tensors are for.
"""

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from formats.checkpoint import CheckpointReader

# One thread copies from the page cache at a quarter of what memory allows.
NUM_THREADS = 4


class ReadAhead:
    """A reader whose tensors come to a device. `expect` says what is wanted next."""

    def __init__(self, reader: CheckpointReader, device: torch.device) -> None:
        self._reader, self._device = reader, device
        self._threads: ThreadPoolExecutor | None = None
        self._expected: dict[str, Future[torch.Tensor]] = {}

    def expect(self, prefix: str) -> None:
        """Begin to read all tensors whose names begin so. They stay on the host until `get`."""
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
        """Drop what was expected and never taken."""
        self._expected.clear()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
