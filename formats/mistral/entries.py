"""Tensors of Mistral's files under transformers' names, with rows in transformers' order."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from formats.errors import CheckpointError
from formats.files.safetensors_header import read_header
from formats.files.tensor_entry import ComputedEntry, TensorEntry, header_of
from formats.mistral.names import Heads, NameMap


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsInHalves(ComputedEntry):
    """Tensor in which the even rows of each head come before the odd ones (names.py)."""

    heads: Heads

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Read rows `start` to `stop` in their new order; reads whole heads."""
        first, last = start // self.heads.width, -(-stop // self.heads.width)
        begin = first * self.heads.width
        # not super(): a dataclass with slots is another class than the one that is defined here
        found = TensorEntry.rows(self, begin, last * self.heads.width)
        halves = found.unflatten(0, (last - first, -1, 2)).transpose(1, 2).flatten(0, 2)
        return halves[start - begin : stop - begin]

    def read(self) -> torch.Tensor:
        """Read the whole tensor. Raises CheckpointError."""
        return self.rows(0, self.shape[0])


def read_headers(files: list[Path]) -> dict[str, TensorEntry]:
    """Return the tensors of all files by their stored names. Raises CheckpointError."""
    found: dict[str, TensorEntry] = {}
    for path in files:
        entries = read_header(path)
        for name in entries.keys() & found.keys():
            raise CheckpointError(
                name,
                f"is in two files, one of them {path.name}",
                "remove the file that does not belong to the model",
            )
        found.update(entries)
    return found


def presented(stored: Mapping[str, TensorEntry], names: NameMap) -> dict[str, TensorEntry]:
    """Return the tensors under transformers' names. Raises CheckpointError for an unknown one."""
    found: dict[str, TensorEntry] = {}
    for name, entry in stored.items():
        own, heads = names.tensor(name), names.heads_of(name, entry.shape)
        if own in found:
            raise CheckpointError(
                name, f"is a second tensor for {own}", "download the published files again"
            )
        if heads is None:
            found[own] = replace(entry, name=own)
        else:
            found[own] = HeadsInHalves(**{**header_of(entry), "name": own}, heads=heads)
    return found
