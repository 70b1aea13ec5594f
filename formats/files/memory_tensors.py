"""MemoryTensors: tensors in memory, presented like the tensors of a model folder.

Names become the names of the family's row, as in `CheckpointReader`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from formats.architecture.bare_model import bare_names
from formats.architecture.expert_names import canonical_names
from formats.architecture.stored_form.entries import canonical_entries
from formats.architecture.stored_form.fused_qkv import rows_of_shards
from formats.architecture.text_part import has_text_part, text_name
from formats.architecture.tied_head import settle_head
from formats.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTensor:
    """A tensor in memory with the interface of TensorEntry."""

    name: str
    tensor: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def num_bytes(self) -> int:
        return self.tensor.nbytes

    def transposed(self) -> "MemoryTensor":
        """Return the tensor with its dims exchanged."""
        return replace(self, tensor=self.tensor.T)

    def normalized(self, dim: int) -> "MemoryTensor":
        """Return the matrix divided by its norms along a dim."""
        made = torch.nn.functional.normalize(self.tensor.float(), dim=dim)
        return replace(self, tensor=made.to(self.dtype))

    def of_shards(self, **part: Any) -> "MemoryTensor":
        """Return some rows of each shard of a fused matrix (stored_form/fused_qkv.py)."""
        made = rows_of_shards(self, part["scales"], SimpleNamespace(**part))
        return MemoryTensor(name=part["name"], tensor=made)

    def matrix(self, name: str, number: int, start: int, stop: int) -> "MemoryTensor":
        """Return rows `start` to `stop` of one matrix of a stack [E, N, K], as a tensor `name`."""
        return MemoryTensor(name=name, tensor=self.tensor[number, start:stop])

    def joined(
        self, parts: "Sequence[MemoryTensor]", name: str, start: int, stop: int
    ) -> "MemoryTensor":
        """Return rows `start` to `stop`, counted over all parts, as a tensor `name`."""
        rows = torch.cat([part.tensor for part in parts])[start:stop]
        return MemoryTensor(name=name, tensor=rows)

    def read(self) -> torch.Tensor:
        """Return the tensor."""
        return self.tensor

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return rows `start` to `stop`, in the host's memory."""
        return self.tensor[start:stop].contiguous().cpu()


class MemoryTensors:
    """Reader of tensors in memory: `config`, `entries` by name, `get(name)`."""

    num_other_parts = 0
    gguf_summary = ""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]], config: dict[str, Any]) -> None:
        """`config`: config.json's content. Raises CheckpointError if a name occurs twice."""
        self.folder = Path("tensors of the update")
        entries: dict[str, MemoryTensor] = {}
        for name, tensor in tensors:
            if name in entries:
                raise CheckpointError(f"tensor {name}", "comes twice in the update")
            if not isinstance(tensor, torch.Tensor):
                raise CheckpointError(
                    f"tensor {name}", f"expected a tensor, found {type(tensor).__name__}"
                )
            entries[name] = MemoryTensor(name=name, tensor=tensor.detach())
        if has_text_part(config):
            entries = {own: e for name, e in entries.items() if (own := text_name(name))}
        entries = canonical_entries(config, entries)
        if renamed := bare_names(entries):
            entries = {own: entries[name] for name, own in renamed.items()}
        self.config, entries = settle_head(config, entries)
        self.unties_head = self.config is not config
        if renamed := canonical_names(self.config, entries):
            entries = {own: entries[name] for name, own in renamed.items()}
        self.entries = entries

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def get(self, name: str) -> torch.Tensor:
        """Return one tensor, on its device.

        Raises CheckpointError if there is none of that name.
        """
        if name not in self.entries:
            raise CheckpointError(f"tensor {name!r}", "is not in the update")
        return self.entries[name].tensor
