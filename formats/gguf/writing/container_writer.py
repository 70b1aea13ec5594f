"""Writer of a GGUF file: metadata, a table of tensors, and their data, made one at a time.

The file is written under another name and renamed when it is complete. Needs no torch.
"""

import os
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.errors import FREE_SPACE, CheckpointError, DiskError, one_line
from formats.files import staging
from formats.files.target import check_has_space
from formats.gguf.block_types import BlockType
from formats.gguf.container import ARRAY, DEFAULT_ALIGNMENT, MAGIC, SCALARS, STRING

VERSION = 3
SUFFIX = ".gguf"
TYPE_IDS = {"u8": 0, "u16": 2, "i32": 5, "u32": 4, "f32": 6, "bool": 7}


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A number or a list of numbers with its GGUF type; strings need no Value."""

    type: str  # a key of TYPE_IDS
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTensor:
    """A tensor to write: its description, and a function that makes its bytes."""

    name: str
    type: BlockType
    shape: tuple[int, ...]  # slowest dimension first
    make: Callable[[], bytes]

    @property
    def num_bytes(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return self.type.row_bytes(count)


def check_file_is_free(target: str | Path) -> Path:
    """Return the path of a file to write.

    Raises CheckpointError if the file exists or its name does not end in .gguf.
    """
    path = Path(target)
    if path.suffix != SUFFIX:
        raise CheckpointError(
            str(target), f"expected a file name that ends in {SUFFIX}", f"add {SUFFIX} to the name"
        )
    if path.exists():
        raise CheckpointError(str(target), "exists already", "name another file, or remove it")
    return path


def write_gguf(
    target: Path, metadata: dict[str, str | list[str] | Value], tensors: Sequence[NewTensor]
) -> int:
    """Write a file and return its size. Raises DiskError, first if the disk is too small."""
    check_has_space(target, sum(tensor.num_bytes for tensor in tensors))
    partial = target.with_name(f".{target.name}.partial")
    staging.register(partial)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(_header(metadata, tensors))
            _pad(file)
            for tensor in tensors:
                data = tensor.make()
                if len(data) != tensor.num_bytes:
                    raise AssertionError(f"{tensor.name}: {len(data)} of {tensor.num_bytes} bytes")
                file.write(data)
                _pad(file)
            size = file.tell()
            file.flush()
            os.fsync(file.fileno())
        partial.rename(target)
    except OSError as error:
        problem = f"cannot be written: {one_line(error)}"
        raise DiskError(str(target), problem, FREE_SPACE) from None
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()
        staging.release(partial)
    return size


def _pad(file: Any) -> None:
    file.write(bytes(-file.tell() % DEFAULT_ALIGNMENT))


def _header(metadata: dict[str, str | list[str] | Value], tensors: Sequence[NewTensor]) -> bytes:
    parts = [MAGIC, struct.pack("<Iqq", VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_string(key), _value(value)]
    offset = 0
    for tensor in tensors:
        dims = tuple(reversed(tensor.shape))
        parts.append(_string(tensor.name))
        parts.append(struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, tensor.type.id, offset))
        offset += -(-tensor.num_bytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
    return b"".join(parts)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: str | list[str] | Value) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    if isinstance(value, list):
        head = struct.pack("<IIQ", ARRAY, STRING, len(value))
        return head + b"".join(map(_string, value))
    kind = TYPE_IDS[value.type]
    if isinstance(value.value, list):
        head = struct.pack("<IIQ", ARRAY, kind, len(value.value))
        return head + struct.pack(f"<{len(value.value)}{SCALARS[kind]}", *value.value)
    return struct.pack(f"<I{SCALARS[kind]}", kind, value.value)
