"""ReadAhead: moves tensors of a checkpoint to a device while the next layer is read.

Reading releases the interpreter lock, so disk reads (or copies from the page cache) and GPU work
overlap. Small tensors that follow each other in the file, such as those of experts, are read and
copied to the device together, because each call costs more time than their bytes. A rank that needs
only some rows of a tensor reads only these rows. For later layers, whose tensors have the same
shapes, it reads the same rows ahead.
"""

import re
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError
from formats.files.tensor_entry import TensorEntry, follows, view_in

# One thread copies from the page cache at a quarter of the memory bandwidth.
NUM_THREADS = 4
# Limits of a task of small tensors: bytes and number of tensors.
TASK_BYTES = 8 * 2**20
TASK_TENSORS = 256
SMALL_BYTES = 2 * 2**20  # a larger tensor is read alone
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # a number in a tensor's name, such as the layer's

CPU = torch.device("cpu")
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
        task = _Task(self)
        for name, entry in self._reader.entries.items():
            if not name.startswith(prefix) or name in self._expected:
                continue
            if name in without or name.rpartition(".")[0] in without:
                continue
            if task.is_full_with(entry):
                task.start(self._threads)
                task = _Task(self)
            ranges = self._ranges.get(_without_numbers(name))
            task.add(name, entry, ranges)
            self._expected[name] = ranges, task
        task.start(self._threads)

    def get(self, name: str, *, shared: bool = False) -> torch.Tensor:
        """Return a tensor on the device. Raises CheckpointError.

        `shared`: it may be a view of memory with other tensors, which it keeps allocated.
        """
        ranges, expected = self._expected.pop(name, (None, None))
        if expected is None or ranges is not None:
            return self._reader.get(name).to(self._device)
        return expected.result(name, self._device, shared=shared)

    def get_rows(self, name: str, ranges: Ranges) -> torch.Tensor:
        """Return some rows of a tensor on the device. Raises CheckpointError.

        Later calls of `expect` read the same rows of this tensor in other layers.
        """
        self._ranges[_without_numbers(name)] = ranges
        before, expected = self._expected.pop(name, (None, None))
        if expected is None or before not in (None, ranges):
            tensor = self._rows(name, ranges)
        elif before is None:
            whole = expected.result(name, CPU, shared=True)
            tensor = torch.cat([whole[start:stop] for start, stop in ranges])
        else:
            tensor = expected.result(name, CPU)
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


class _Run:
    """Tensors whose bytes follow each other in a file, read with one call."""

    def __init__(self, entries: Sequence[TensorEntry]) -> None:
        """Read the tensors. Raises CheckpointError."""
        self._first, last = entries[0], entries[-1]
        self._data = self._first.read_bytes(0, last.offset + last.num_bytes - self._first.offset)

    def tensor(self, entry: TensorEntry, device: torch.device, *, shared: bool) -> torch.Tensor:
        """Return a tensor on a device, to which the first call moves the whole run."""
        if device != CPU:
            self._data = self._data.to(device)
        found = view_in(self._data, entry, self._first)
        return found if shared else found.clone()


class _Task:
    """Tensors that one thread reads: a large one, or small ones."""

    def __init__(self, reader: ReadAhead) -> None:
        self.names: dict[str, Ranges | None] = {}  # tensor -> rows to read; None: all
        self._entries: dict[str, TensorEntry] = {}
        self._num_bytes = self._largest = 0
        self._reader = reader
        self._future: Future[dict[str, torch.Tensor | _Run | CheckpointError]]

    def is_full_with(self, entry: TensorEntry) -> bool:
        """Return True if a tensor belongs to the next task."""
        if not self.names:
            return False
        is_long = len(self.names) == TASK_TENSORS
        is_large = max(entry.num_bytes, self._largest) > SMALL_BYTES
        return is_long or is_large or self._num_bytes + entry.num_bytes > TASK_BYTES

    def add(self, name: str, entry: TensorEntry, ranges: Ranges | None) -> None:
        self.names[name], self._entries[name] = ranges, entry
        self._num_bytes += entry.num_bytes
        self._largest = max(self._largest, entry.num_bytes)

    def start(self, threads: ThreadPoolExecutor) -> None:
        self._future = threads.submit(self._read)

    def _read(self) -> dict[str, "torch.Tensor | _Run | CheckpointError"]:
        found: dict[str, torch.Tensor | _Run | CheckpointError] = {}
        for run in self._runs():
            try:
                if len(run) > 1:
                    found |= dict.fromkeys(run, _Run([self._entries[name] for name in run]))
                    continue
            except CheckpointError:
                pass  # find out below which tensor is wrong
            for name in run:
                try:
                    found[name] = self._reader.read(name, self.names[name])
                except CheckpointError as error:  # raised when this tensor is requested
                    found[name] = error
        return found

    def _runs(self) -> list[list[str]]:
        """Return the names in runs that can be read with one call each."""
        runs: list[list[str]] = []
        for name, ranges in self.names.items():
            before = runs[-1][-1] if runs else ""
            whole = ranges is None and before and self.names[before] is None
            if whole and follows(self._entries[name], self._entries[before]):
                runs[-1].append(name)
            else:
                runs.append([name])
        return runs

    def result(self, name: str, device: torch.device, *, shared: bool = False) -> torch.Tensor:
        """Return a tensor, once all of the task are read. Raises CheckpointError."""
        found = self._future.result().pop(name)
        if isinstance(found, CheckpointError):
            raise found
        if isinstance(found, _Run):
            return found.tensor(self._entries[name], device, shared=shared)
        return found.to(device)


def _without_numbers(name: str) -> str:
    return NUMBER.sub("#", name)
