"""Tensors of published files with the canonical names and order of dims."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from formats.architecture.expert_stacks import split_experts
from formats.architecture.family import Family
from formats.architecture.stored_form import deepseek_v4, float_blocks, latent
from formats.architecture.stored_form.fused_qkv import with_separate_qkv
from formats.architecture.stored_form.joined_rows import with_stated_rows
from formats.architecture.stored_form.normalized_head import with_normalized_head
from formats.families import family_of
from formats.files.tensor_entry import TensorEntry, header_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TransposedEntry(TensorEntry):
    """Matrix of a file, presented transposed: `shape` is not the file's shape."""

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return rows `start` to `stop`, columns in the file; reads the whole matrix."""
        return self.read()[start:stop]

    def read(self) -> torch.Tensor:
        """Read the whole matrix. Raises CheckpointError."""
        rows, columns = self.shape
        stored = self.read_bytes(0, self.num_bytes).view(self.dtype).reshape(columns, rows)
        return stored.T.contiguous()


def canonical_entries(
    config: Mapping[str, Any], entries: dict[str, TensorEntry]
) -> dict[str, TensorEntry]:
    """Return the tensors with the names and the order of dims of the family's row.

    Raises CheckpointError for an unsupported stack of quantized experts.
    """
    family = family_of(config)
    if family is None:
        return entries
    masks = tuple(f".{name}" for name in family.masks)
    if masks:
        entries = {n: entry for n, entry in entries.items() if not n.endswith(masks)}
    if family.model_type == "deepseek_v4":
        entries = {deepseek_v4.published(name): entry for name, entry in entries.items()}
        entries = float_blocks.in_groups(config, entries)
    if family.model_type == "axk1":
        entries = latent.axk1_entries(config, entries)
    for stored, own in family.other_tensors.items():
        entries = {
            f"{name.removesuffix(stored)}{own}" if name.endswith(f".{stored}") else name: entry
            for name, entry in entries.items()
        }
    if family.other_names:
        entries = {_canonical_name(family, name): entry for name, entry in entries.items()}
    prefix = family.left_out_prefix
    if prefix and not any(name.startswith(prefix) for name in entries):
        ends = f"{family.head.partition('.')[0]}."
        entries = {n if n.startswith(ends) else prefix + n: e for n, e in entries.items()}
    entries = with_separate_qkv(config, family, entries)
    entries = with_stated_rows(config, family, split_experts(config, entries))
    entries = with_normalized_head(config, family, entries)
    exchanged = transposed_names(config, entries)
    return {n: _exchanged(e) if n in exchanged else e for n, e in entries.items()}


def _canonical_name(family: Family, name: str) -> str:
    """Return a tensor's name with its module named as in the family's row."""
    module, dot, leaf = name.rpartition(".")
    parent, _, last = module.rpartition(".")
    canonical = family.other_names.get(last)
    return name if canonical is None else f"{parent}.{canonical}{dot}{leaf}"


def transposed_names(
    config: Mapping[str, Any], entries: Mapping[str, TensorEntry]
) -> frozenset[str]:
    """Return the weights that the family stores as [inputs, outputs]."""
    family = family_of(config)
    if family is None or not family.transposed:
        return frozenset()
    layer = re.escape(family.layer).replace(re.escape("{i}"), r"\d{1,9}")
    names = "|".join(re.escape(linear.name) for linear in family.linears)
    stored = re.compile(rf"{layer}\.(?:{names})\.weight")
    return frozenset(n for n, e in entries.items() if stored.fullmatch(n) and len(e.shape) == 2)


def _exchanged(entry: Any) -> Any:
    if not isinstance(entry, TensorEntry):
        return entry.transposed()  # a tensor in memory (MemoryTensors)
    return TransposedEntry(**{**header_of(entry), "shape": entry.shape[::-1]})
