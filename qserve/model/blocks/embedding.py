"""Token embedding, the first operation of a decoder. V: vocabulary size. C: hidden size."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from formats.in_memory.fp8 import Fp8Weight
from formats.in_memory.shards import Shard
from formats.in_memory.slices import take_outputs
from formats.in_memory.weights import Weight, tensors_of
from qserve.model.blocks.norm import Norm
from qserve.parallel.communicator import Communicator
from qserve.parallel.gather import gathered_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyPart:
    """The range of token ids whose embedding and head rows this rank has."""

    communicator: Communicator
    shards: tuple[Shard, ...]  # (start, stop) of each rank

    @property
    def start(self) -> int:
        return self.shards[self.communicator.rank][0]

    @property
    def stop(self) -> int:
        return self.shards[self.communicator.rank][1]

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.shards)


class PackedTable(torch.nn.Module):
    """A quantized table [V, C]. Only the requested rows are dequantized."""

    def __init__(self, weight: Weight, dtype: torch.dtype) -> None:
        super().__init__()
        if isinstance(weight, Fp8Weight):  # may have one scale for all rows
            weight = weight.with_scales_of_rows()
        self.packed, self.dtype, self.device = weight, dtype, weight.device
        for name, tensor in tensors_of(weight).items():  # registered so that they count as memory
            self.register_buffer(name.replace(" ", "_"), tensor, persistent=False)

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Return the rows of these token ids, [T, C]."""
        return take_outputs(self.packed, ids_T).dequantize(self.dtype)

    def dense(self) -> torch.Tensor:
        """Return all rows, [V, C]."""
        return self.packed.dequantize(self.dtype)


class Embedding(torch.nn.Module):
    """Rows of a table [V, C], times a factor, plus learned position embeddings, then a norm.

    The table may be sharded over ranks.
    """

    def __init__(
        self,
        table: torch.Tensor | PackedTable,
        factor: float = 1.0,
        part: VocabularyPart | None = None,
        positions_PC: torch.Tensor | None = None,  # learned embeddings; row p is for position p
        norm: Norm | None = None,
    ) -> None:
        super().__init__()
        self.packed = table if isinstance(table, PackedTable) else None
        self.register_buffer("weight", None if self.packed else table)
        self.register_buffer("positions", positions_PC)
        self.dtype, self.device = table.dtype, table.device
        # rounded to the table's dtype, as transformers does for Gemma
        self.factor = torch.tensor(factor, dtype=self.dtype).item()
        self.part, self.norm = part, norm

    def dense(self) -> torch.Tensor:
        """Return this rank's rows of the table."""
        return self.weight if self.packed is None else self.packed.dense()

    def whole_table(self) -> torch.Tensor:
        """Return the whole table, gathered from all ranks. All ranks must call this."""
        if self.part is None:
            return self.dense()
        whole_CV = gathered_columns(self.part.communicator, self.dense().T, self.part.widths)
        return whole_CV.T.contiguous()

    def _rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        if self.packed is not None:
            return self.packed.rows(ids_T)
        return functional.embedding(ids_T, self.weight)

    def forward(self, token_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        if self.part is None:
            x_TC = self._rows(token_ids_T)
        else:
            x_TC = self._gathered(token_ids_T, self.part)
        x_TC = x_TC if self.factor == 1 else x_TC * self.factor
        if self.positions is not None:
            x_TC = x_TC + functional.embedding(positions_T, self.positions)
        return x_TC if self.norm is None else self.norm(x_TC, None, None)[0]

    def _gathered(self, token_ids_T: torch.Tensor, part: VocabularyPart) -> torch.Tensor:
        """Return rows summed over all ranks: one rank has a token's row, the others add zeros."""
        is_ours_T = (token_ids_T >= part.start) & (token_ids_T < part.stop)
        rows_T = torch.where(is_ours_T, token_ids_T - part.start, 0)
        x_TC = self._rows(rows_T)
        return part.communicator.all_reduce(x_TC.masked_fill(~is_ours_T[:, None], 0))
