"""AxisRopes: rotary embedding for rows whose positions have several axes (M-RoPE).

Each pair of channels is rotated by the position on one axis. In Hunyuan's models both channels of a
pair may have different axes: a step's table has two parts of D columns, one for the first halves of
heads and one for the second. Each step gets a rotary table with one
row per row of the step; the rotary kernel reads it with the row number as the position.

A: axes. T: rows of the step. D: rotated channels.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from formats.architecture.rope_types import (
    axes_of_halves,
    axes_of_pairs,
    axes_with_frames_last,
)
from qserve.model.blocks.rotary import Rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRopes:
    """Rotary tables for the rows of one step."""

    tables: dict[Rotary, torch.Tensor]  # float32 [T, D], or [T, 2 D]
    rows_T: torch.Tensor  # int64, 0 to T - 1

    def of_rows(self, rows: slice) -> "RowRopes":
        """Return the tables for a range of rows."""
        tables = {rotary: table_TD[rows] for rotary, table_TD in self.tables.items()}
        return RowRopes(tables=tables, rows_T=self.rows_T[: rows.stop - rows.start])


class AxisRopes:
    """Makes the rotary tables of steps, for all rotary embeddings of a decoder."""

    def __init__(
        self,
        rotaries: Iterable[Rotary],
        sections: Sequence[int],
        *,
        is_interleaved: bool,
        divides_channels: bool = False,
        has_frames_last: bool = False,
    ) -> None:
        """Raises InputError if `sections`, the number of channel pairs per axis, do not fit.

        `divides_channels`: sections divide the channels in order, not the pairs (Hunyuan).
        `has_frames_last`: sections are of rows, columns and frames, in this order (ERNIE).
        """
        self.num_axes = len(sections)
        # for each Rotary: axis and source column of each column of the step's table
        self._columns: dict[Rotary, tuple[torch.Tensor, torch.Tensor]] = {}
        for rotary in dict.fromkeys(rotaries):
            num_pairs = rotary.cos_sin.shape[1] // 2
            if not num_pairs:
                continue
            if divides_channels:
                parts = axes_of_halves(sections, num_pairs)
            elif has_frames_last:
                parts = (axes_with_frames_last(sections, num_pairs),)
            else:
                parts = (axes_of_pairs(sections, num_pairs, is_interleaved=is_interleaved),)
            device = rotary.cos_sin.device
            self._columns[rotary] = (
                torch.tensor([axis for axes in parts for axis in axes * 2], device=device),
                torch.arange(2 * num_pairs, device=device).repeat(len(parts)),
            )

    def of(self, positions_AT: torch.Tensor) -> RowRopes:
        """Return the tables for rows at these positions."""
        rows_T = torch.arange(positions_AT.shape[1], device=positions_AT.device)
        tables = {
            rotary: rotary.cos_sin[positions_AT[axes_D].T, columns_D]
            for rotary, (axes_D, columns_D) in self._columns.items()
        }
        return RowRopes(tables=tables, rows_T=rows_T)
