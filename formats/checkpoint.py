"""Reading and writing a model folder: config.json, safetensors shards, their index.

The reader is lazy: it opens headers, and bytes only when asked. The writer streams shards into a
hidden folder beside the target and renames it at the end, so that a killed run never leaves a
folder that looks complete. Knows nothing of layers, schemes or models.
"""

import json
import os
import shutil
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from formats.bare_model import bare_names, with_head
from formats.errors import CheckpointError, DiskError, one_line
from formats.folder_lock import make_locked
from formats.side_files import copy_side_files, find_side_files
from formats.text_part import has_text_part, text_config, text_name

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# A model of 100,000 tensors needs 10 MB of either; more costs a reader seconds and memory.
MAX_HEADER_BYTES = 25_000_000
MAX_JSON_BYTES = 25_000_000
OTHER_FORMS = (".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5")  # pickles, other frameworks
GGUF_REMEDY = "take the model's safetensors, and quantize them"
MAX_DIMS = 8
MAX_EXTENT = 2**48
DEFAULT_MAX_SHARD_BYTES = 2 * 10**9
# safetensors dtype -> (torch dtype, bits)
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor as a header describes it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    num_bytes: int
    file: Path
    offset: int  # of its first byte in the file


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError where it is missing or not one."""
    try:
        size = _size_of_file(path)
        if size > MAX_JSON_BYTES:
            raise CheckpointError(
                str(path), f"has {size} bytes, the limit is {MAX_JSON_BYTES}", "fetch it again"
            )
        text = path.read_text(encoding="utf-8")
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half a character: ValueError
    except FileNotFoundError:
        raise CheckpointError(str(path), "not found", "is this a model folder?") from None
    except OSError as error:
        raise CheckpointError(str(path), f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(str(path), f"is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(str(path), f"expected a JSON object, found {type(value).__name__}")
    return value


def _size_of_file(path: Path) -> int:
    """Bytes of a regular file: a pipe or a device would never end."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(str(path), "cannot be read: is not a file")
    return status.st_size


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; the usual parser would keep the last of two tensors of one name."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands in it twice")
    return found


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors that a safetensors file declares, checked against its size. Reads no tensor data.

    Layout: 8 bytes header length (little-endian), the JSON header, the data, without gaps.
    """
    try:
        size = _size_of_file(path)
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    str(path), "is not a safetensors file, or is truncated", "fetch it again"
                )
            header = json.loads(file.read(length), object_pairs_hook=_without_duplicates)
        if not isinstance(header, dict):
            raise TypeError(f"expected a JSON object, found {type(header).__name__}")
        entries, spans = {}, []
        for name, item in header.items():
            if name == "__metadata__":
                continue
            if not name.isprintable():  # no writer's name: half a character, or a terminal's code
                raise ValueError(f"{name!r:.100} is no name of a tensor")
            if item["dtype"] not in DTYPES:
                raise CheckpointError(f"{path}: {name}", f"unknown dtype {item['dtype']!r}")
            dtype, shape = DTYPES[item["dtype"]], tuple(item["shape"])
            begin, end = item["data_offsets"]
            if not all(type(number) is int for number in (*shape, begin, end)):
                raise TypeError(f"{name} has a shape or an offset that is no whole number")
            if len(shape) > MAX_DIMS or max(shape, default=0) > MAX_EXTENT:
                raise ValueError(f"{name} has an absurd shape")
            count = 1
            for extent in shape:
                count *= extent
            if min(shape, default=0) < 0 or begin < 0 or end - begin != count * dtype.itemsize:
                raise CheckpointError(
                    f"{path}: {name}", f"{end - begin} bytes do not hold {list(shape)} {dtype}"
                )
            if 8 + length + end > size:
                raise CheckpointError(
                    str(path),
                    f"truncated: {name} ends at byte {8 + length + end}, the file has {size}",
                    "fetch it again",
                )
            entries[name] = TensorEntry(
                name=name,
                dtype=dtype,
                shape=shape,
                num_bytes=end - begin,
                file=path,
                offset=8 + length + begin,
            )
            spans.append((begin, end))
        position = 0
        for begin, end in sorted(spans):
            if begin != position:
                raise ValueError(f"tensors overlap or leave a gap at byte {position} of the data")
            position = end
        if 8 + length + position != size:
            raise ValueError(f"{size - 8 - length - position} bytes belong to no tensor")
    except FileNotFoundError:
        raise CheckpointError(str(path), "not found", "the checkpoint is incomplete") from None
    except OSError as error:
        raise CheckpointError(str(path), f"cannot be read: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(str(path), f"its safetensors header is damaged: {error}") from None
    return entries


class CheckpointReader:
    """A model folder, opened lazily: `config`, `entries` by tensor name, `get(name)`.

    Of a model that also sees pictures it has the text model (text_part.py), of one without a head
    the names that it would have with one (bare_model.py).
    """

    def __init__(self, folder: str | Path) -> None:
        """Read config.json and every shard's header. Raises CheckpointError."""
        self.folder = Path(folder)
        if self.folder.suffix == ".gguf":
            raise CheckpointError(str(folder), "is a GGUF file, which is not read", GGUF_REMEDY)
        if not self.folder.is_dir():
            raise CheckpointError(str(folder), "is not a folder", "give a local model folder")
        self.config = read_json(self.folder / CONFIG)
        self.entries: dict[str, TensorEntry] = {}
        index_path = self.folder / INDEX
        listed = self._listed_files(index_path) if index_path.exists() else {SINGLE: set()}
        if SINGLE in listed and not (self.folder / SINGLE).exists():
            self._explain_missing_file()
        for file_name, expected in listed.items():
            entries = read_header(self.folder / file_name)
            for name in expected - entries.keys():
                raise CheckpointError(str(self.folder / file_name), f"holds no {name!r}")
            for name in entries.keys() & self.entries.keys():
                raise CheckpointError(name, f"stands in two shards, one of them {file_name}")
            self.entries.update(entries)
        self.num_other_parts = 0  # tensors of a picture's part, which nobody here reads
        if has_text_part(self.config):
            kept = {own: e for name, e in self.entries.items() if (own := text_name(name))}
            self.config = text_config(self.config, kept)
            self.num_other_parts = len(self.entries) - len(kept)
            self.entries = kept
        if renamed := bare_names(self.entries):
            self.entries = {own: self.entries[name] for name, own in renamed.items()}
        self.config = with_head(self.config, self.entries, is_bare=bool(renamed))

    def _explain_missing_file(self) -> None:
        """Raise CheckpointError where the weights are there under another name, or in a form that
        is not read."""
        for suffixes, remedy in (
            ((".safetensors",), f"rename it to {SINGLE} if it holds all weights"),
            ((".gguf",), f"GGUF is not read: {GGUF_REMEDY}"),
            (OTHER_FORMS, "write safetensors: save_pretrained of transformers does"),
        ):
            files = (path for path in self.folder.iterdir() if path.is_file())
            found = sorted(path.name for path in files if path.suffix in suffixes)
            if found:
                raise CheckpointError(
                    str(self.folder), f"has no {SINGLE}, but {', '.join(found[:3])}", remedy
                )

    @staticmethod
    def _listed_files(index_path: Path) -> dict[str, set[str]]:
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(str(index_path), "has no weight_map")
        files: dict[str, set[str]] = {}
        for name, file_name in weight_map.items():
            plain = isinstance(file_name, str) and Path(file_name).name == file_name
            if not plain or file_name in ("", ".."):
                raise CheckpointError(str(index_path), f"{file_name!r} is not a plain file name")
            files.setdefault(file_name, set()).add(name)
        return files

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def get(self, name: str, device: str = "cpu") -> torch.Tensor:
        """One tensor. Raises CheckpointError where there is none of that name.

        Its bytes are read, not mapped: pages of a mapped file would count as this process's memory.
        """
        if name not in self.entries:
            raise CheckpointError(f"tensor {name!r}", f"is not in {self.folder}")
        entry = self.entries[name]
        data = torch.empty(entry.num_bytes, dtype=torch.uint8)
        try:
            with entry.file.open("rb", buffering=0) as file:
                file.seek(entry.offset)
                view, done = memoryview(data.numpy()), 0
                while done < entry.num_bytes:
                    count = file.readinto(view[done:])
                    if not count:
                        raise CheckpointError(str(entry.file), f"ends inside {name}")
                    done += count
        except OSError as error:
            raise CheckpointError(str(entry.file), f"cannot be read: {error.strerror}") from None
        if not entry.num_bytes:
            return torch.empty(entry.shape, dtype=entry.dtype, device=device)
        return data.view(entry.dtype).reshape(entry.shape).to(device)

    def children(self, prefix: str) -> dict[str, TensorEntry]:
        """Entries below `prefix` + ".", by what follows it."""
        start = prefix + "."
        return {n[len(start) :]: e for n, e in self.entries.items() if n.startswith(start)}


def check_is_free(folder: str | Path) -> None:
    """Raise CheckpointError where a folder to write is there and holds something."""
    path = Path(folder)
    if path.is_dir() and any(path.iterdir()):
        raise CheckpointError(
            str(path), "already exists and is not empty", "give a new folder or empty it"
        )
    if path.exists() and not path.is_dir():
        raise CheckpointError(str(path), "is no folder", "give a new folder")


class CheckpointWriter:
    """Write a model folder shard by shard; it appears under its name only with `publish()`.

    Use as a context manager: leaving it without `publish()` deletes what was staged.
    """

    def __init__(
        self, folder: str | Path, *, max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES
    ) -> None:
        """Raises CheckpointError where `folder` holds anything, or another run is writing it."""
        # Resolved: a rename replaces neither "." nor a link to a folder.
        self.folder = Path(folder).resolve()
        self.staging = self.folder.parent / f".{self.folder.name}.partial"
        self._lock = -1  # descriptor of the staging folder while it is ours
        check_is_free(folder)
        try:
            self._lock = make_locked(self.staging)
        except BlockingIOError:
            raise CheckpointError(
                str(folder),
                f"another run is writing it (it holds {self.staging})",
                "wait for it to end, or give another folder",
            ) from None
        except OSError as error:
            raise CheckpointError(str(folder), f"cannot be made: {error.strerror}") from None
        try:
            check_is_free(folder)  # again: the run that had the lock may just have finished
        except CheckpointError:
            self._discard()
            raise
        self.max_shard_bytes = max_shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._discard()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Queue one tensor; a full shard goes to disk at once."""
        size = tensor.nbytes
        if self._pending and self._pending_bytes() + size > self.max_shard_bytes:
            self._flush()
        if name in self._pending or any(name in shard for shard in self._shards):
            raise ValueError(f"{name} was added twice")
        self._pending[name] = tensor.detach().cpu().contiguous()
        self._total_bytes += size

    def seal(self, config: dict[str, Any], *, side_files_from: Path) -> Path:
        """Write the rest: last shard, index, config, side files. Returns the staged folder."""
        find_side_files(side_files_from)  # raises before anything is written
        if self._pending:
            self._flush()
        count = len(self._shards)
        weight_map = {}
        with self._writing():
            for number, names in enumerate(self._shards, 1):
                file_name = (
                    SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
                )
                self._staged_shard(number).rename(self.staging / file_name)
                weight_map.update(dict.fromkeys(names, file_name))
            copy_side_files(side_files_from, self.staging)
        if count > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            self.write_json(INDEX, index)
        self.write_json(CONFIG, config)
        return self.staging

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Add a JSON file to the staged folder."""
        self.write_text(name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Add a file to the staged folder."""
        with self._writing():
            (self.staging / name).write_text(text, encoding="utf-8")

    def publish(self) -> None:
        """Put the sealed folder under its name: synced to disk, then one rename.

        Raises CheckpointError; where only the rename failed, the staged folder is kept.
        """
        with self._writing():
            # safetensors writes files that only their owner can read; a server may be another user.
            mode = (self.staging / CONFIG).stat().st_mode
            for path in self.staging.rglob("*"):
                if path.is_file():
                    path.chmod(mode)
                _sync(path)
            _sync(self.staging)
        try:
            self.staging.rename(self.folder)
        except OSError as error:
            self._release()
            raise CheckpointError(
                str(self.folder),
                f"the finished checkpoint cannot get this name: {error.strerror}",
                f"it is complete in {self.staging}: move it from there before the next run",
            ) from None
        self._release()
        with suppress(OSError):  # it is there; a power cut in this second may still lose the name
            _sync(self.folder.parent)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turns what a disk refuses into a DiskError."""
        try:
            yield
        except (SafetensorError, OSError) as error:
            raise DiskError(
                str(self.folder), f"cannot be written: {one_line(error)}", "is the disk full?"
            ) from None

    def _discard(self) -> None:
        """Remove what was staged, unless it was published or is kept for the user."""
        if self._lock >= 0:
            shutil.rmtree(self.staging, ignore_errors=True)
            self._release()

    def _release(self) -> None:
        os.close(self._lock)
        self._lock = -1

    def _pending_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._pending.values())

    def _staged_shard(self, number: int) -> Path:
        return self.staging / f"shard-{number:05d}.safetensors"

    def _flush(self) -> None:
        self._shards.append(list(self._pending))
        path = self._staged_shard(len(self._shards))
        with self._writing():
            # transformers before 5 refuses a file without this metadata.
            save_file(self._pending, path, metadata={"format": "pt"})
        self._pending = {}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
