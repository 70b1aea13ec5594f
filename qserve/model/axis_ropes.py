"""AxisRopes: rotations of rows whose positions have three axes (M-RoPE).

Each pair of channels turns by the position of one axis. The step gets a table of its own rows,
which the rotation kernel reads with the row's number as the position.

Legend: T rows of the step, D rotated channels, P pairs (D/2).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from formats.architecture.rope_types import axes_of_pairs
from qserve.model.blocks.rotary import Rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRopes:
    """Rotations of one step's rows."""

    tables: dict[Rotary, torch.Tensor]  # float32 [T, D]
    rows_T: torch.Tensor  # int64, 0 to T - 1

    def of_rows(self, rows: slice) -> "RowRopes":
        """Return the rotations of consecutive rows."""
        tables = {rotary: table_TD[rows] for rotary, table_TD in self.tables.items()}
        return RowRopes(tables=tables, rows_T=self.rows_T[: rows.stop - rows.start])


class AxisRopes:
    """Makes the tables of steps for all rotations of a decoder."""

    def __init__(
        self, rotaries: Iterable[Rotary], sections: Sequence[int], *, is_interleaved: bool
    ) -> None:
        """`sections`: number of pairs of each axis. Raises InputError if they do not fit."""
        # for each rotation: the axis, and the column, of each column of its table
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
        """Return the rotations of rows at these positions."""
        rows_T = torch.arange(positions_3T.shape[1], device=positions_3T.device)
        tables = {
            rotary: rotary.cos_sin[positions_3T[axes_D].T, columns_D]
            for rotary, (axes_D, columns_D) in self._columns.items()
        }
        return RowRopes(tables=tables, rows_T=rows_T)
