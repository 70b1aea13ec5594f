"""Container of a GGUF file: metadata and a table of tensors, checked against the file's size.

Layout, little-endian: `GGUF`, u32 version, i64 number of tensors, i64 number of metadata pairs, the
pairs, the tensors' descriptions, padding, data. A string is its u64 length and its bytes. Files are
untrusted: every count and length is limited by the remaining bytes, and the header as a whole is
limited, too. Needs no torch.
"""

import array
import math
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from formats.errors import CHECK_ACCESS, CheckpointError
from formats.files.model_path import SPLIT_NAME
from formats.gguf.block_types import BlockType, find_type

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
ALIGNMENT = "general.alignment"
MAX_DIMS = 4
MAX_EXTENT = 2**40
MAX_TENSORS = 200_000
MAX_PAIRS = 20_000
MAX_NAME_BYTES = 256
MAX_STRING_BYTES = 2**23  # a chat template has 10 kB
MAX_HEADER_BYTES = 2**28
MAX_STRINGS = 4_000_000  # in all arrays; a vocabulary of 262,144 tokens has as many merges
REMEDY = "download the file again"
STRING, ARRAY = 8, 9
# id of a scalar type -> struct code; 7 is a bool
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
SCALARS[12] = "d"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor as a GGUF file describes it."""

    name: str
    type: BlockType
    shape: tuple[int, ...]  # slowest dimension first, as in torch; files list the fastest first
    file: Path
    offset: int  # position of its first byte in the file

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.type.row_bytes(self.num_elements)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """Metadata and tensors of a file, or of all files of a split model."""

    files: tuple[Path, ...]
    metadata: dict[str, Any]  # arrays of numbers are array.array, others are lists
    tensors: dict[str, StoredTensor]


def read_gguf(path: str | Path) -> GgufFile:
    """Read the header of a file, or of all files of a split model. Raises CheckpointError."""
    paths = split_files(Path(path))
    parts = [_read_part(each) for each in paths]
    if len(parts) == 1:
        _check_whole(paths[0], parts[0].metadata)
        return parts[0]
    tensors: dict[str, StoredTensor] = {}
    for number, part in enumerate(parts):
        stated = part.metadata.get("split.no"), part.metadata.get("split.count")
        if stated != (number, len(parts)):
            raise CheckpointError(
                str(paths[number]),
                f"expected split.no {number} of {len(parts)}, found {stated[0]} of {stated[1]}",
                REMEDY,
            )
        for name in part.tensors.keys() & tensors.keys():
            raise CheckpointError(
                f"{paths[number]}: {name}", "is in two files of the split", REMEDY
            )
        tensors.update(part.tensors)
    total = parts[0].metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise CheckpointError(
            str(paths[0]), f"states {total} tensors in all files, found {len(tensors)}", REMEDY
        )
    return GgufFile(files=paths, metadata=parts[0].metadata, tensors=tensors)


def split_files(path: Path) -> tuple[Path, ...]:
    """Return all files of a split model in order, given any of them; else the single file.

    Raises CheckpointError if a file is missing.
    """
    match = SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count:
        raise CheckpointError(str(path), f"is number {match['number']} of {count} files", REMEDY)
    found = []
    for number in range(1, count + 1):
        part = path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf")
        if not part.is_file():
            raise CheckpointError(
                str(part), f"is missing; the model is split into {count} files", "download it too"
            )
        found.append(part)
    return tuple(found)


def _check_whole(path: Path, metadata: dict[str, Any]) -> None:
    count = metadata.get("split.count", 0)
    if isinstance(count, int) and count > 1 and SPLIT_NAME.fullmatch(path.name) is None:
        raise CheckpointError(
            str(path),
            f"is one of {count} files of a split model, but its name is not that of one",
            f"name the files {path.stem}-00001-of-{count:05d}.gguf and so on",
        )


def _read_part(path: Path) -> GgufFile:
    try:
        if not path.is_file():
            raise CheckpointError(str(path), "not found", "give a GGUF file")
        with path.open("rb") as file:
            return _Header(file, path).read()
    except OSError as error:
        raise CheckpointError(
            str(path), f"cannot be read: {error.strerror}", CHECK_ACCESS
        ) from None
    except MemoryError:
        raise CheckpointError(str(path), "its header does not fit into memory", REMEDY) from None


class _Header:
    """Reader of one file's header."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self._size = path.stat().st_size
        self._position = 0
        self._strings = 0  # number of strings in arrays

    def read(self) -> GgufFile:
        if self._take(4) != MAGIC:
            raise self._wrong("is not a GGUF file: it does not start with GGUF", "give a model")
        version = self._number("I")
        if version & 0xFFFF == 0 and version:
            raise self._wrong("is big-endian, which is not supported", "convert it on this machine")
        if version not in VERSIONS:
            raise self._wrong(
                f"has version {version} of the format; 2 and 3 are read",
                "convert it with a current llama.cpp",
            )
        num_tensors = self._count("tensors", MAX_TENSORS)
        num_pairs = self._count("metadata pairs", MAX_PAIRS)
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string(MAX_NAME_BYTES, "a key")
            if key in metadata:
                raise self._wrong(f"has the key {key!r:.80} twice")
            metadata[key] = self._value(self._number("I"), key)
        described = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get(ALIGNMENT, DEFAULT_ALIGNMENT)
        is_power = isinstance(alignment, int) and 0 < alignment <= 2**20
        if not is_power or alignment & (alignment - 1):
            raise self._wrong(f"{ALIGNMENT}: expected a power of two, found {alignment!r:.40}")
        start = -(-self._position // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        for name, kind, shape, offset in described:
            if name in tensors:
                raise self._wrong(f"has the tensor {name!r} twice")
            if offset % alignment:
                raise self._wrong(f"{name} starts at {offset}, which is no multiple of {alignment}")
            tensors[name] = StoredTensor(
                name=name, type=kind, shape=shape, file=self._path, offset=start + offset
            )
        self._check_places(tensors)
        return GgufFile(files=(self._path,), metadata=metadata, tensors=tensors)

    def _tensor(self) -> tuple[str, BlockType, tuple[int, ...], int]:
        name = self._string(MAX_NAME_BYTES, "a tensor's name")
        if not name or not name.isprintable():
            raise self._wrong(f"{name!r:.80} is not a valid tensor name")
        num_dims = self._number("I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise self._wrong(f"{name} has {num_dims} dimensions; 1 to {MAX_DIMS} are read")
        fastest_first = [self._number("Q") for _ in range(num_dims)]
        subject = f"{self._path}: {name}"
        kind = find_type(self._number("I"), subject)
        if min(fastest_first) < 1 or math.prod(fastest_first) > MAX_EXTENT:
            raise CheckpointError(
                subject, f"its shape {fastest_first} is empty or too large", REMEDY
            )
        if fastest_first[0] % kind.length:
            raise CheckpointError(
                subject,
                f"its rows of {fastest_first[0]} are not whole blocks of {kind.name}",
                REMEDY,
            )
        return name, kind, tuple(reversed(fastest_first)), self._number("Q")

    def _check_places(self, tensors: dict[str, StoredTensor]) -> None:
        """Raise CheckpointError if tensors overlap or extend beyond the file."""
        end, before = 0, ""
        for tensor in sorted(tensors.values(), key=lambda each: each.offset):
            if tensor.offset < end:
                raise self._wrong(f"the data of {tensor.name} overlaps that of {before}")
            end, before = tensor.offset + tensor.num_bytes, tensor.name
            if end > self._size:
                raise self._wrong(
                    f"truncated: {tensor.name} ends at byte {end}, the file has {self._size}"
                )

    def _value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            return self._string(MAX_STRING_BYTES, key)
        if kind != ARRAY:
            return self._number(self._scalar(kind, key))
        of, count = self._number("I"), self._number("Q")
        if of == ARRAY:
            raise self._wrong(f"{key!r:.80} is an array of arrays, which no reader takes")
        if of == STRING:
            self._strings += count
            if self._strings > MAX_STRINGS or 8 * count > self._size - self._position:
                raise self._wrong(f"{key!r:.80} has {count} strings: more than the file can hold")
            return [self._string(MAX_STRING_BYTES, key) for _ in range(count)]
        code = self._scalar(of, key)
        data = self._take(count * struct.calcsize(f"<{code}"))
        if code == "?":
            return [byte != 0 for byte in data]
        values = array.array(code, data)
        if sys.byteorder == "big":
            values.byteswap()
        return values

    def _scalar(self, kind: int, key: str) -> str:
        if kind not in SCALARS:
            raise self._wrong(f"{key!r:.80} has the unknown type {kind}")
        return SCALARS[kind]

    def _count(self, of: str, most: int) -> int:
        count = self._number("q")
        # the shortest description has 12 bytes
        if not 0 <= count <= min(most, (self._size - self._position) // 12):
            raise self._wrong(f"states {count} {of}: more than the file can hold")
        return count

    def _string(self, most: int, what: str) -> str:
        length = self._number("Q")
        if length > most:
            raise self._wrong(f"{what:.80} has {length} bytes; at most {most} are read")
        # tokens of a byte-level vocabulary need not be valid UTF-8
        return self._take(length).decode("utf-8", errors="replace")

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _take(self, count: int) -> bytes:
        end = self._position + count
        if end > min(self._size, MAX_HEADER_BYTES):
            problem = "ends inside its header" if end > self._size else "has too long a header"
            raise self._wrong(problem)
        self._position = end
        data = self._file.read(count)
        if len(data) != count:
            raise self._wrong("ends inside its header")
        return data

    def _wrong(self, problem: str, remedy: str = REMEDY) -> CheckpointError:
        return CheckpointError(str(self._path), problem, remedy)
