"""Heads whose weight is divided by its norms before use: Baichuan 2, some Ling models.

The reader presents the normalized weight, and a config without the key that asks for it. Files
that are written from it hold the normalized weight and say so under another key (IS_NORMALIZED).
Without that key a head is normalized when it is read, such as a head that a trainer sends in a
weight update. Normalizing a head twice changes at most the last bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from formats.architecture.family import Family
from formats.families import family_of
from formats.files.tensor_entry import ComputedEntry, TensorEntry

IS_NORMALIZED = "head_is_normalized"  # key of config.json, true if the stored head is normalized


@dataclass(frozen=True, slots=True, kw_only=True)
class NormalizedEntry(ComputedEntry):
    """Matrix of a file, divided by its norms along a dim."""

    dim: int

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Read rows `start` to `stop`; the whole matrix if a norm is over rows."""
        if self.dim == 0:
            return self.read()[start:stop]
        return self._normalized(TensorEntry.rows(self, start, stop))

    def read(self) -> torch.Tensor:
        """Read the whole matrix. Raises CheckpointError."""
        return self._normalized(TensorEntry.read(self))

    def _normalized(self, weight_VC: torch.Tensor) -> torch.Tensor:
        made = torch.nn.functional.normalize(weight_VC.float(), dim=self.dim)
        return made.to(self.dtype)


def with_normalized_head(
    config: Mapping[str, Any], family: Family, entries: dict[str, TensorEntry]
) -> dict[str, TensorEntry]:
    """Return the tensors with a normalized head, if config.json asks for one."""
    head, is_asked_for = entries.get(family.head), config.get(family.normalized_head)
    if head is None or not family.normalized_head:
        return entries
    if not (is_asked_for or config.get(IS_NORMALIZED)):
        return entries
    dim = family.head_norm_dim
    if not isinstance(head, TensorEntry):  # a tensor in memory (MemoryTensors)
        return {**entries, family.head: head.normalized(dim)}
    if not is_asked_for:
        return entries
    values = {field.name: getattr(head, field.name) for field in fields(TensorEntry)}
    return {**entries, family.head: NormalizedEntry(**values, dim=dim)}


def without_head_norm(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json for tensors whose head is normalized."""
    family = family_of(config)
    if family is None or not config.get(family.normalized_head):
        return config
    return {**config, family.normalized_head: False, IS_NORMALIZED: True}
