"""Reader of a draft head's folder, with a check of every tensor.

Weights are safetensors, or a torch file of plain tensors (`pytorch_model.bin`,
`medusa_lm_head.pt`), which is read without running code from it.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from formats.checkpoint import CONFIG, CheckpointReader, TensorEntry, read_header, read_json
from formats.errors import CheckpointError, one_line
from formats.heads import tensors as names
from formats.heads.block_config import DFLASH, DSPARK
from formats.heads.config import (
    EAGLE,
    EAGLE3,
    MEDUSA,
    PEAGLE,
    EagleConfig,
    HeadConfig,
    head_kind,
    read_head_config,
)
from formats.layouts import is_quantized
from formats.quant_config import QuantConfig, find_block

MEDUSA_FILE = "medusa_lm_head.safetensors"
TORCH_FILES = ("medusa_lm_head.pt", "pytorch_model.bin")
STATE_NORM = "layers.0.hidden_norm.weight"


class HeadFolder:
    """Open head folder: `config`, `entries` by the names in the file, `get(name)`.

    `stored(name)` is the file's name of a canonical module or tensor.
    """

    num_other_parts = 0  # number of tensors that were left out: none
    unties_head = False
    gguf_summary = ""  # a head is no GGUF file

    def __init__(self, folder: str | Path) -> None:
        """Raises CheckpointError if the folder is not a head's, or has an unexpected tensor."""
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(str(folder), "is not a folder", "give a local head folder")
        self.raw = read_json(self.folder / CONFIG)
        self._open()
        block = find_block(self.folder, self.raw)
        self.quant = QuantConfig.from_dict(block) if block else None
        self._names = {names.canonical(name): name for name in self.entries}
        if len(self._names) != len(self.entries):
            raise CheckpointError(str(folder), "holds a tensor under two names", "remove one")
        self.config = self._read_config()
        self._check_names()

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def get(self, name: str, device: str = "cpu") -> torch.Tensor:
        """Read a tensor by its name in the file."""
        if self._tensors is not None:
            return self._tensors[name].to(device)
        return self._reader.get(self._read_as[name], device)

    def stored(self, name: str) -> str:
        """Return the file's name of a canonical tensor or module; if missing, the name itself."""
        if name in self._names:
            return self._names[name]
        for own, stored in self._names.items():
            if own.startswith(f"{name}."):
                return stored.removesuffix(own.removeprefix(name))
        return name

    def has(self, name: str) -> bool:
        """Return True if the file has a canonical tensor."""
        return name in self._names

    def has_linear(self, name: str) -> bool:
        """Return True if the file has a canonical matrix, in float or quantized."""
        stored = self.stored(name)
        return f"{name}.weight" in self._names or is_quantized(stored, self.entries)

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Return [N, K] of each float matrix by its canonical name, in the order they run."""
        found = {}
        for name in names.linears(self.config):
            if self.has(f"{name}.weight"):
                found[name] = self.entries[self.stored(f"{name}.weight")].shape
        return found

    def _open(self) -> None:
        """Open the weights."""
        self._tensors: Mapping[str, torch.Tensor] | None = None
        safe = self.folder / MEDUSA_FILE
        torch_file = next((f for f in TORCH_FILES if (self.folder / f).is_file()), None)
        if safe.is_file():
            self._tensors = _LazyFile(safe)
            self.entries = dict(self._tensors.entries)
        elif torch_file is not None and not any(self.folder.glob("model*.safetensors")):
            self._tensors = read_torch_file(self.folder / torch_file)
            self.entries = {
                name: _entry(name, tensor, self.folder / torch_file)
                for name, tensor in self._tensors.items()
            }
        else:
            self._reader = CheckpointReader(self.folder)
            # keyed by names in the file, since the reader renames tensors of models without a head
            self._read_as = {entry.name: own for own, entry in self._reader.entries.items()}
            self.entries = {entry.name: entry for entry in self._reader.entries.values()}
        self.entries = {n: e for n, e in self.entries.items() if not names.is_derived(n)}

    def _read_config(self) -> HeadConfig:
        kind = head_kind(self.raw) or _kind_of(self._names)
        if kind is None:
            raise CheckpointError(
                str(self.folder),
                "is not a draft head",
                f"known: {EAGLE3}, {PEAGLE}, {EAGLE}, {MEDUSA}, {DFLASH}, {DSPARK}",
            )
        config = read_head_config(self.raw, kind)
        if isinstance(config, EagleConfig) and self.has("fc_norm.0.weight"):
            config = replace(config, fc_norm=True)  # older configs lack this key
        if isinstance(config, EagleConfig) and self.has("input_norm.weight"):
            config = replace(config, norm_before_fc=True)
        return config

    def _check_names(self) -> None:
        """Check that every tensor of the file is known and none is missing."""
        shapes = names.shapes(self.config)
        modules = names.linears(self.config)
        for name, stored in self._names.items():
            module, _, leaf = name.rpartition(".")
            codes = module in modules and is_quantized(self.stored(module), self.entries)
            if codes and leaf != "bias":
                continue
            if name not in shapes:
                raise CheckpointError(
                    f"{self.folder}: {stored}",
                    f"does not belong in a head of the kind {self.config.kind}",
                    "config.json and the weights do not belong together, or the head is of a kind"
                    " that is not served",
                )
            expected, found = shapes[name], self.entries[stored].shape
            if expected and tuple(found) != expected:
                raise CheckpointError(
                    f"{self.folder}: {stored}",
                    f"expected {list(expected)} from config.json, found {list(found)}",
                    "download the head's weights and config.json again",
                )
        lacking = [name for name in names.required(self.config) if not self.has(name)]
        without = names.may_be_missing(self.config)
        lacking += [n for n in modules if n not in without and not self.has_linear(n)]
        if lacking:
            raise CheckpointError(
                f"{self.folder}: {lacking[0]}",
                "is missing from the head",
                "download the head's weights and config.json again",
            )


def kind_of_folder(folder: str | Path) -> str | None:
    """Return the kind of head in a folder, by config.json, else by its tensors; None: no head."""
    folder = Path(folder)
    try:
        found = head_kind(read_json(folder / CONFIG))
        if found is not None:
            return found
        for file in sorted(folder.glob("model*.safetensors"))[:1]:
            found = _kind_of({names.canonical(name) for name in read_header(file)})
    except CheckpointError:
        return None
    if found is None and (folder / TORCH_FILES[1]).is_file():  # EAGLE's first heads
        found = _kind_of({names.canonical(n) for n in read_torch_file(folder / TORCH_FILES[1])})
    return found


def is_head_folder(folder: str | Path) -> bool:
    """Return True if a folder holds a draft head."""
    return kind_of_folder(folder) is not None


def _kind_of(found: Collection[str]) -> str | None:
    """Return the kind by canonical tensor names.

    EAGLE's configs are often plain Llama configs.
    """
    for name, kind in (
        (STATE_NORM, EAGLE3),
        (names.HIDDEN_NORM, DFLASH),
        ("fc.weight", EAGLE),
        ("0.0.linear.weight", MEDUSA),
    ):
        if name in found or name.replace(".weight", ".qweight") in found:
            return kind
    return None


def read_torch_file(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a torch file. Raises CheckpointError if it contains anything else."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch does not document its errors on damaged files and on code
        raise CheckpointError(
            str(path), f"cannot be read as plain tensors: {one_line(error)}", "write safetensors"
        ) from None
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in found.items()
    ):
        raise CheckpointError(
            str(path),
            f"expected tensors by name, found {type(found).__name__}",
            "write safetensors",
        )
    return found


class _LazyFile(Mapping[str, torch.Tensor]):
    """Tensors of one safetensors file, read on request."""

    def __init__(self, path: Path) -> None:
        self.path, self.entries = path, read_header(path)

    def __getitem__(self, name: str) -> torch.Tensor:
        entry = self.entries[name]
        data = torch.empty(entry.num_bytes, dtype=torch.uint8)
        with self.path.open("rb") as file:
            file.seek(entry.offset)
            file.readinto(memoryview(data.numpy()))
        return data.view(entry.dtype).reshape(entry.shape)

    def __iter__(self) -> Any:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def _entry(name: str, tensor: torch.Tensor, path: Path) -> TensorEntry:
    return TensorEntry(
        name=name,
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        num_bytes=tensor.nbytes,
        file=path,
        offset=0,
    )
