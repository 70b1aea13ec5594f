"""AxisRopes: rotary embedding for rows whose positions have three axes (M-RoPE).

Each pair of channels is rotated by the position on one axis. Each step gets a rotary table with one
row per row of the step; the rotation kernel reads it with the row number as the position.

T: rows of the step. D: rotated channels.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from formats.architecture.rope_types import axes_of_pairs
from qserve.model.blocks.rotary import Rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRopes:
    """Rotary tables for the rows of one step."""

    tables: dict[Rotary, torch.Tensor]  # float32 [T, D]
    rows_T: torch.Tensor  # int64, 0 to T - 1

    def of_rows(self, rows: slice) -> "RowRopes":
        """Return the tables for a range of rows."""
        tables = {rotary: table_TD[rows] for rotary, table_TD in self.tables.items()}
        return RowRopes(tables=tables, rows_T=self.rows_T[: rows.stop - rows.start])


class AxisRopes:
    """Makes the rotary tables of steps, for all rotary embeddings of a decoder."""

    def __init__(
        self, rotaries: Iterable[Rotary], sections: Sequence[int], *, is_interleaved: bool
    ) -> None:
        """`sections`: number of channel pairs per axis. Raises InputError if they do not fit."""
        # for each Rotary: axis and source column of each column of the step's table
        self._columns: dict[Rotary, tuple[torch.Tensor, torch.Tensor]] = {}
        for rotary in dict.fromkeys(rotaries):
            num_pairs = rotary.cos_sin.shape[1] // 2
            if not num_pairs:
                continue
            axes = axes_of_pairs(sections, num_pairs, is_interleaved=is_interleaved)
            device = rotary.cos_sin.device
            self._columns[rotary] = (
                torch.tensor(axes * 2, device=device),
                torch.arange(2 * num_pairs, device=device),
            )

    def of(self, positions_3T: torch.Tensor) -> RowRopes:
        """Return the tables for rows at these positions."""
        rows_T = torch.arange(positions_3T.shape[1], device=positions_3T.device)
        tables = {
            rotary: rotary.cos_sin[positions_3T[axes_D].T, columns_D]
            for rotary, (axes_D, columns_D) in self._columns.items()
        }
        return RowRopes(tables=tables, rows_T=rows_T)
