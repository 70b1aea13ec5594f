"""Tensors that transformers concatenates when it loads a model, and splits equally when it saves.

OLMo-Hybrid's queries, keys and values have a convolution each in a file, and values are wider.
transformers 5 writes a third of all rows under each name, and concatenates the three when it reads:
the rows and their order are the same.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from formats.architecture.family import Family
from formats.architecture.sizes import size
from formats.files.tensor_entry import ComputedEntry, TensorEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedRows(ComputedEntry):
    """Rows of several tensors that follow each other. `offset`: not used."""

    parts: tuple[TensorEntry, ...]
    start: int  # the first row, counted over all parts

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Read rows `start` to `stop` from the parts that have them. Raises CheckpointError."""
        found, first, last = [], self.start + start, self.start + stop
        for part in self.parts:
            count = part.shape[0]
            begin, end = max(first, 0), min(last, count)
            if begin < end:
                found.append(part.rows(begin, end))
            first, last = first - count, last - count
        return torch.cat(found)

    def read(self) -> torch.Tensor:
        """Read all rows. Raises CheckpointError."""
        return self.rows(0, self.shape[0])


def with_stated_rows(
    config: Mapping[str, Any], family: Family, entries: dict[str, TensorEntry]
) -> dict[str, TensorEntry]:
    """Return the tensors with as many rows each as config.json states."""
    if family.state_mixer is None or not family.joined_in_transformers:
        return entries
    sizes, shapes = family.sizes(config), family.state_mixer.tensors(config)
    layer, found = re.escape(family.layer).replace(re.escape("{i}"), r"\d{1,9}"), dict(entries)
    for names in family.joined_in_transformers.values():
        stated = [size(shapes[name][0], sizes) for name in names]
        pattern = re.compile(rf"({layer}\.){re.escape(names[0])}")
        for match in filter(None, map(pattern.fullmatch, entries)):
            own = [f"{match[1]}{name}" for name in names]
            if None not in stated:
                found |= _divided(own, stated, entries)
    return found


def _divided(
    names: list[str], stated: list[int], entries: Mapping[str, TensorEntry]
) -> dict[str, TensorEntry]:
    """Return the tensors of these names with these rows; none if they have them, or cannot."""
    parts = tuple(entries.get(name) for name in names)
    if not all(part is not None and part.shape for part in parts):
        return {}
    counts = [part.shape[0] for part in parts]
    alike = len({(part.shape[1:], part.dtype) for part in parts}) == 1
    if counts == stated or sum(counts) != sum(stated) or not alike:
        return {}
    starts = list(accumulate([0, *stated[:-1]]))
    if not isinstance(parts[0], TensorEntry):  # tensors in memory (MemoryTensors)
        return {
            name: parts[0].joined(parts, name, start, start + rows)
            for name, rows, start in zip(names, stated, starts, strict=True)
        }
    row_bytes = parts[0].num_bytes // counts[0]
    return {
        name: JoinedRows(
            name=name,
            dtype=part.dtype,
            shape=(rows, *part.shape[1:]),
            num_bytes=rows * row_bytes,
            file=part.file,
            offset=part.offset,
            parts=parts,
            start=start,
        )
        for name, part, rows, start in zip(names, parts, stated, starts, strict=True)
    }
