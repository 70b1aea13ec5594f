"""Entries of a checkpoint: the location of a tensor, which is read on request."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from formats.errors import CHECK_ACCESS, DOWNLOAD_AGAIN, CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor as a safetensors header describes it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    num_bytes: int
    file: Path
    offset: int  # offset of the first byte in the file

    @property
    def stored_as(self) -> str:
        """Name of the dtype in the file."""
        return str(self.dtype).removeprefix("torch.")

    def blocks(self, max_bytes: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (index of the first value, values) of each run of at most `max_bytes`.

        All runs share one buffer. Raises OSError.
        """
        buffer = torch.empty(min(max_bytes, self.num_bytes), dtype=torch.uint8)
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.offset)
            for begin in range(0, self.num_bytes, max_bytes):
                block = buffer[: self.num_bytes - begin]
                if file.readinto(memoryview(block.numpy())) != len(block):
                    raise OSError("the file ends inside")
                yield begin // self.dtype.itemsize, block.view(self.dtype)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Read rows `start` to `stop` of a tensor of one or more dims. Raises CheckpointError.

        The file is read, not mapped, because mapped pages count as memory of this process.
        """
        num_rows = self.shape[0] if self.shape else 0
        if stop > num_rows:
            raise CheckpointError(
                self.name,
                f"expected {stop} rows or more, found {num_rows}",
                "copy config.json from the checkpoint that has this tensor",
            )
        row_bytes = self.num_bytes // max(num_rows, 1)
        data = self.read_bytes(start * row_bytes, stop * row_bytes)
        return data.view(self.dtype).reshape(stop - start, *self.shape[1:])

    def read(self) -> torch.Tensor:
        """Read the whole tensor from its file. Raises CheckpointError."""
        if not self.num_bytes:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        return self.read_bytes(0, self.num_bytes).view(self.dtype).reshape(self.shape)

    def read_bytes(self, start: int, stop: int) -> torch.Tensor:
        """Read bytes `start` to `stop` of the tensor's data. Raises CheckpointError."""
        data = torch.empty(stop - start, dtype=torch.uint8, device="cpu")
        try:
            with self.file.open("rb", buffering=0) as file:
                file.seek(self.offset + start)
                view, done = memoryview(data.numpy()), 0
                while done < len(view):
                    count = file.readinto(view[done:])
                    if not count:
                        raise CheckpointError(
                            str(self.file), f"ends inside {self.name}", DOWNLOAD_AGAIN
                        )
                    done += count
        except OSError as error:
            raise CheckpointError(
                str(self.file), f"cannot be read: {error.strerror}", CHECK_ACCESS
            ) from None
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedEntry(TensorEntry):
    """A tensor whose values differ from the bytes in the file. Subclasses define `read`."""

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return rows `start` to `stop`; this reads the whole tensor. Raises CheckpointError."""
        return self.read()[start:stop]

    def blocks(self, max_bytes: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (index of the first value, values) of runs. Raises CheckpointError."""
        values, count = self.read().flatten(), max_bytes // self.dtype.itemsize
        for begin in range(0, len(values), count):
            yield begin, values[begin : begin + count]


def header_of(entry: TensorEntry) -> dict[str, Any]:
    """Return what a header states of a tensor, as arguments of an entry of another class."""
    return {field.name: getattr(entry, field.name) for field in fields(TensorEntry)}


def follows(entry: TensorEntry, before: TensorEntry) -> bool:
    """Return True if a tensor's bytes directly follow those of another one in the same file."""
    plain = type(entry) is TensorEntry and type(before) is TensorEntry
    return plain and entry.file == before.file and entry.offset == before.offset + before.num_bytes


def view_in(data: torch.Tensor, entry: TensorEntry, first: TensorEntry) -> torch.Tensor:
    """Return a tensor as a view of bytes that begin with the tensor `first`."""
    start = entry.offset - first.offset
    own = data[start : start + entry.num_bytes]
    if start % entry.dtype.itemsize:
        own = own.clone()  # a view must be aligned
    return own.view(entry.dtype).reshape(entry.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedShape(TensorEntry):
    """A shape that a header's metadata states, read like a tensor."""

    values: tuple[int, ...]

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return self.read()[start:stop]

    def read(self) -> torch.Tensor:
        return torch.tensor(self.values)
