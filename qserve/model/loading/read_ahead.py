"""ReadAhead: moves tensors of a checkpoint to a device while the next layer is read.

Reading releases the interpreter lock, so disk reads (or copies from the page cache) and GPU work
overlap. A rank that needs only some rows of a tensor reads only these rows. For later layers, whose
tensors have the same shapes, it reads the same rows ahead.
"""

import re
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from formats.checkpoint import CheckpointReader

# One thread copies from the page cache at a quarter of the memory bandwidth.
NUM_THREADS = 4
# A task reads neighbouring tensors up to these limits: experts have thousands of small tensors a
# layer, and a task for each would cost more time than reading them.
TASK_BYTES = 8 * 2**20
TASK_TENSORS = 64
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # a number in a tensor's name, such as the layer's

Ranges = tuple[tuple[int, int], ...]  # ranges of rows: (start, stop)


class ReadAhead:
    """A checkpoint reader that returns tensors on a device. `expect` starts reading ahead."""

    def __init__(self, reader: CheckpointReader, device: torch.device) -> None:
        self._reader, self._device = reader, device
        self._threads: ThreadPoolExecutor | None = None
        # name -> (rows that are read ahead, None: all; the task that reads them)
        self._expected: dict[str, tuple[Ranges | None, _Task]] = {}
        self._ranges: dict[str, Ranges] = {}  # name without numbers -> rows that a layer needed

    def expect(self, prefix: str, without: Collection[str] = ()) -> None:
        """Start reading all tensors with this prefix. They stay on the host until `get`.

        `without`: names of tensors and modules to leave out.
        """
        if self._threads is None:
            self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="read-ahead")
        task, size = _Task(self), 0
        for name, entry in self._reader.entries.items():
            if not name.startswith(prefix) or name in self._expected:
                continue
            if name in without or name.rpartition(".")[0] in without:
                continue
            if task.names and (
                size + entry.num_bytes > TASK_BYTES or len(task.names) == TASK_TENSORS
            ):
                task.start(self._threads)
                task, size = _Task(self), 0
            ranges = self._ranges.get(_without_numbers(name))
            task.names[name] = ranges
            size += entry.num_bytes
            self._expected[name] = ranges, task
        task.start(self._threads)

    def get(self, name: str) -> torch.Tensor:
        """Return a tensor on the device. Raises CheckpointError."""
        ranges, expected = self._expected.pop(name, (None, None))
        is_here = expected is not None and ranges is None
        tensor = expected.result(name) if is_here else self._reader.get(name)
        return tensor.to(self._device)

    def get_rows(self, name: str, ranges: Ranges) -> torch.Tensor:
        """Return some rows of a tensor on the device. Raises CheckpointError.

        Later calls of `expect` read the same rows of this tensor in other layers.
        """
        self._ranges[_without_numbers(name)] = ranges
        before, expected = self._expected.pop(name, (None, None))
        if expected is None or before not in (None, ranges):
            tensor = self._rows(name, ranges)
        elif before is None:
            whole = expected.result(name)
            tensor = torch.cat([whole[start:stop] for start, stop in ranges])
        else:
            tensor = expected.result(name)
        return tensor.to(self._device)

    def read(self, name: str, ranges: Ranges | None) -> torch.Tensor:
        """Read some rows of a tensor into host memory; None: all. Raises CheckpointError."""
        return self._reader.get(name) if ranges is None else self._rows(name, ranges)

    def _rows(self, name: str, ranges: Ranges) -> torch.Tensor:
        entry = self._reader.entries[name]
        parts = [entry.rows(start, stop) for start, stop in ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def rows(self, name: str, numbers: Sequence[int]) -> torch.Tensor:
        """Return some rows of a tensor on the device. Other rows are not read.

        `numbers`: row numbers in ascending order.
        """
        entry, runs = self._reader.entries[name], []
        for number in numbers:
            if runs and runs[-1][1] == number:
                runs[-1][1] = number + 1
            else:
                runs.append([number, number + 1])
        return torch.cat([entry.rows(start, stop) for start, stop in runs]).to(self._device)

    def close(self) -> None:
        """Stop reading ahead, and drop tensors that were never used."""
        self._expected.clear()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None


class _Task:
    """Tensors that one thread reads, in order."""

    def __init__(self, reader: ReadAhead) -> None:
        self.names: dict[str, Ranges | None] = {}  # tensor -> rows to read; None: all
        self._reader = reader
        self._future: Future[dict[str, torch.Tensor | Exception]]

    def start(self, threads: ThreadPoolExecutor) -> None:
        self._future = threads.submit(self._run)

    def _run(self) -> dict[str, torch.Tensor | Exception]:
        found: dict[str, torch.Tensor | Exception] = {}
        for name, ranges in self.names.items():
            try:
                found[name] = self._reader.read(name, ranges)
            except Exception as error:  # raised when this tensor is requested, if it is
                found[name] = error
        return found

    def result(self, name: str) -> torch.Tensor:
        """Return a tensor, once all of the task are read. Raises CheckpointError."""
        found = self._future.result().pop(name)
        if isinstance(found, Exception):
            raise found
        return found


def _without_numbers(name: str) -> str:
    return NUMBER.sub("#", name)
