"""Reader and writer of a model folder: config.json, safetensors shards, their index.

The reader is lazy: it parses headers, and reads tensor data only on request. The writer streams
shards into a hidden folder next to the target and renames it at the end, so a killed run never
leaves a folder that looks complete.
"""

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from formats.architecture.bare_model import bare_names, with_head
from formats.architecture.expert_names import canonical_names
from formats.architecture.published_names.cosmos3 import reasoner_config
from formats.architecture.published_names.table import named_as_in_transformers
from formats.architecture.stored_form.config import canonical_config
from formats.architecture.stored_form.entries import canonical_entries, transposed_names
from formats.architecture.stored_form.normalized_head import without_head_norm
from formats.architecture.text_part import has_text_part, text_config, text_name
from formats.architecture.tied_head import settle_head
from formats.errors import DOWNLOAD_AGAIN, FREE_SPACE, CheckpointError, DiskError, one_line
from formats.files import staging
from formats.files.folder_lock import make_locked
from formats.files.json_file import read_json
from formats.files.model_path import (
    check_is_no_adapter,
    is_file_inside,
    is_gguf_folder,
    is_mistral_folder,
    model_folder,
)
from formats.files.safetensors_header import read_header
from formats.files.side_files import copy_side_files, find_side_files
from formats.files.target import check_is_free
from formats.files.tensor_entry import TensorEntry
from formats.scheme import Scheme

__all__ = [
    "CONFIG",
    "DEFAULT_MAX_SHARD_BYTES",
    "INDEX",
    "SINGLE",
    "CheckpointReader",
    "CheckpointWriter",
    "TensorEntry",
    "read_header",
    "read_json",
]

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
OTHER_FORMS = (".bin", ".pt", ".pth", ".msgpack", ".h5")  # pickles, other frameworks
DEFAULT_MAX_SHARD_BYTES = 2 * 10**9


class CheckpointReader:
    """Model folder, opened lazily: `config`, `entries` by tensor name, `get(name)`.

    Different files are presented in one form:

    - a vision-language model as its text model (text_part.py);
    - published names of some multimodal models as transformers' names, and a unified checkpoint of
      Cosmos3 as its Reasoner (published_names/);
    - files of older families with today's keys and order of dims (stored_form/);
    - a model without a head under the names of the class with a head (bare_model.py);
    - experts under the names of the family's row (expert_names.py);
    - a head that config.json ties to the embedding as untied, if the tensors differ (tied_head.py).
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        as_floats: bool = False,
        rounded: bool = False,
        in_blocks: bool = True,
    ) -> None:
        """Read config.json and every shard's header. Raises CheckpointError.

        `as_floats` presents quantized linears as floats in the dtype of config.json, which are
        decoded when they are read (float_view.py). `folder` may be a GGUF file, for which there are
        two more options. `rounded` rounds floats to the dtype of config.json; otherwise they are
        exact, in float32. `in_blocks` False presents linears as floats that would otherwise stay in
        their blocks (KWeight).
        """
        self.folder = model_folder(folder)
        check_is_no_adapter(self.folder)
        if not self.folder.is_dir():
            raise CheckpointError(str(folder), "is not a folder", "give a local model folder")
        self.config = read_json(self.folder / CONFIG)
        self.entries: dict[str, TensorEntry] = {}
        self.whole_config = self.config  # as stored, including the vision part's keys
        self.other_parts: dict[str, TensorEntry] = {}  # tensors of the vision part, by stored name
        self.unties_head = False
        # weights that are stored as [inputs, outputs]; CheckpointWriter stores them that way again
        self.transposed: frozenset[str] = frozenset()
        self.gguf_summary = ""  # how the blocks of a GGUF file run
        self.decoded: dict[str, Scheme] = {}  # with `as_floats`: schemes of quantized linears
        if is_gguf_folder(self.folder):
            from formats.gguf.opened import open_gguf  # imports the tables of all architectures

            opened = open_gguf(
                self.folder,
                self.config,
                as_floats=as_floats,
                rounded=rounded,
                in_blocks=in_blocks,
            )
            self.config, self.entries = opened.config, opened.entries
            self.transposed = transposed_names(self.config, self.entries)
            self.gguf_summary = opened.summary
            return
        self.entries = self._stored_entries()
        self.entries = named_as_in_transformers(self.config, self.entries)
        self.config = self.whole_config = reasoner_config(self.config)
        if has_text_part(self.config):
            kept = {own: e for name, e in self.entries.items() if (own := text_name(name))}
            self.config = text_config(self.config, kept)
            self.other_parts = {
                name: entry for name, entry in self.entries.items() if text_name(name) is None
            }
            self.entries = kept
        self.config = canonical_config(self.config)
        self.entries = canonical_entries(self.config, self.entries)
        self.config = without_head_norm(self.config)
        self.transposed = transposed_names(self.config, self.entries)
        if renamed := bare_names(self.entries):
            self.entries = {own: self.entries[name] for name, own in renamed.items()}
        stated = self.config
        self.config, self.entries = settle_head(stated, self.entries)
        # config.json asks for a tied head, but the tensors hold another one
        self.unties_head = self.config is not stated
        self.config = with_head(self.config, self.entries, is_bare=bool(renamed))
        if renamed := canonical_names(self.config, self.entries):
            self.entries = {own: self.entries[name] for name, own in renamed.items()}
        if as_floats:
            self._decode()

    def _decode(self) -> None:
        """Present quantized linears as floats."""
        from formats.float_view import float_view, without_block  # imports all formats

        self.config, self.entries, self.decoded = float_view(self.folder, self.config, self.entries)
        if self.decoded:
            self.whole_config = without_block(self.whole_config)

    def _stored_entries(self) -> dict[str, TensorEntry]:
        """Return the tensors of all files. Raises CheckpointError."""
        if is_mistral_folder(self.folder):
            from formats.mistral.folder import open_folder

            return open_folder(self.folder, self.config)
        found: dict[str, TensorEntry] = {}
        index_path = self.folder / INDEX
        listed = self._listed_files(index_path) if index_path.exists() else {SINGLE: set()}
        if SINGLE in listed and not (self.folder / SINGLE).exists():
            self._explain_missing_file()
        for file_name, expected in listed.items():
            entries = read_header(self.folder / file_name)
            for name in expected - entries.keys():
                raise CheckpointError(
                    str(self.folder / file_name),
                    f"does not contain {name!r}, which {INDEX} lists there",
                    DOWNLOAD_AGAIN,
                )
            for name in entries.keys() & found.keys():
                raise CheckpointError(
                    name,
                    f"is in two shards, one of them {file_name}",
                    "download the checkpoint again",
                )
            found.update(entries)
        return found

    def _explain_missing_file(self) -> None:
        """Raise CheckpointError if the weights have an unsupported file name or file type."""
        for suffixes, remedy in (
            ((".safetensors",), f"rename it to {SINGLE} if it holds all weights"),
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
            raise CheckpointError(str(index_path), "has no weight_map", DOWNLOAD_AGAIN)
        files: dict[str, set[str]] = {}
        for name, file_name in weight_map.items():
            if not is_file_inside(file_name):
                raise CheckpointError(
                    str(index_path),
                    f"{file_name!r} is not the name of a file in the folder",
                    DOWNLOAD_AGAIN,
                )
            files.setdefault(file_name, set()).add(name)
        return files

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        entries = (*self.entries.values(), *self.other_parts.values())
        return sum(entry.num_bytes for entry in entries)

    @property
    def num_other_parts(self) -> int:
        """Number of tensors of the vision part."""
        return len(self.other_parts)

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def get(self, name: str, device: str = "cpu") -> torch.Tensor:
        """Read one tensor. Raises CheckpointError if there is no tensor with this name."""
        if name not in self.entries:
            raise CheckpointError(
                f"tensor {name!r}", f"is not in {self.folder}", "use a complete checkpoint"
            )
        return self.entries[name].read().to(device)

    def children(self, prefix: str) -> dict[str, TensorEntry]:
        """Return the entries whose name starts with `prefix` + ".", keyed by the rest."""
        start = prefix + "."
        return {n[len(start) :]: e for n, e in self.entries.items() if n.startswith(start)}


class CheckpointWriter:
    """Write a model folder shard by shard; `publish()` gives it its final name.

    Use as a context manager: leaving it without `publish()` deletes the staged files.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
        transposed: Collection[str] = (),
        as_stated: Mapping[str, Any] | None = None,
    ) -> None:
        """Create the staging folder.

        `transposed` names matrices to store with their dims exchanged (CheckpointReader.transposed
        of the source). `as_stated` holds keys of config.json with the values to write. Raises
        CheckpointError if `folder` is not empty or another run is writing it, or if
        `max_shard_bytes` is no positive number.
        """
        if not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
            raise CheckpointError(
                "max_shard_bytes",
                f"expected a number of bytes above 0, found {max_shard_bytes!r:.80}",
                "give a whole number",
            )
        self._transposed, self._as_stated = frozenset(transposed), dict(as_stated or {})
        # resolve the path, because a rename cannot replace "." or a link to a folder
        self.folder = Path(folder).resolve()
        self.staging = self.folder.parent / f".{self.folder.name}.partial"
        self._lock = -1  # descriptor that holds the lock of the staging folder
        check_is_free(folder)
        try:
            self._lock = make_locked(self.staging)
        except BlockingIOError:
            raise CheckpointError(
                str(folder),
                f"another run is writing it and has locked {self.staging}",
                "wait for that run to end, or give another folder",
            ) from None
        except OSError as error:
            raise CheckpointError(
                str(folder), f"cannot be created: {error.strerror}", "give another folder"
            ) from None
        staging.register(self.staging)
        try:
            check_is_free(folder)  # check again: the run that had the lock may have just finished
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
        """Queue one tensor; write the shard to disk when it is full."""
        size = tensor.nbytes
        if self._pending and self._pending_bytes() + size > self.max_shard_bytes:
            self._flush()
        if name in self._pending or any(name in shard for shard in self._shards):
            raise ValueError(f"{name} was added twice")
        stored = tensor.T if name in self._transposed else tensor
        self._pending[name] = stored.detach().cpu().contiguous()
        self._total_bytes += size

    def seal(self, config: dict[str, Any], *, side_files_from: Path) -> Path:
        """Write the last shard, index, config and side files. Returns the staged folder."""
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
        self.write_json(CONFIG, {**config, **self._as_stated})
        return self.staging

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Add a JSON file to the staged folder."""
        self.write_text(name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Add a file to the staged folder."""
        self.write_bytes(name, text.encode())

    def write_bytes(self, name: str, content: bytes) -> None:
        """Add a file to the staged folder."""
        with self._writing():
            (self.staging / name).write_bytes(content)

    def publish(self) -> None:
        """Sync the sealed folder to disk and rename it to its final name.

        Raises CheckpointError. If only the rename fails, the staged folder is kept.
        """
        with self._writing():
            # safetensors creates files that only their owner can read, but a server may run as
            # another user
            mode = (self.staging / CONFIG).stat().st_mode
            for path in self.staging.glob("*.safetensors"):
                path.chmod(mode)
            for path in self.staging.rglob("*"):
                _sync(path)
            _sync(self.staging)
        try:
            self.staging.rename(self.folder)
        except OSError as error:
            self._release()
            raise CheckpointError(
                str(self.folder),
                f"cannot rename the finished checkpoint to this name: {error.strerror}",
                f"it is complete in {self.staging}; move it before the next run",
            ) from None
        self._release()
        with suppress(OSError):  # renamed already; if the sync fails, a power cut may undo it
            _sync(self.folder.parent)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn errors of the file system into a DiskError."""
        try:
            yield
        except (SafetensorError, OSError) as error:
            raise DiskError(
                str(self.folder), f"cannot be written: {one_line(error)}", FREE_SPACE
            ) from None

    def _discard(self) -> None:
        """Remove the staged folder unless it was published or is kept for the user."""
        if self._lock >= 0:
            shutil.rmtree(self.staging, ignore_errors=True)
            self._release()

    def _release(self) -> None:
        staging.release(self.staging)
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
