"""In which order GPTQ takes the columns of a weight, and when a group's scale is chosen.

What stands late in the order makes up for the errors of what stands early, so large inputs go
first. Legend: N outputs, K inputs, L inputs of a group.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

# Columns that are rounded one by one before the columns behind them hear of it all at once.
BLOCK_COLUMNS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnOrder:
    """A row of ORDERS."""

    name: str
    # (diagonal of H [K], L) -> the columns in the order in which they are taken, int64 [K]
    columns: Callable[[torch.Tensor, int], torch.Tensor]
    # Is a group's scale chosen when its turn comes, for the weights as they are by then? Else all
    # are chosen before, for the weights as they were.
    late_scales: bool = False
    # Does a group have the columns that stand together in this order (act-order)? Else those that
    # stand together in the model.
    regroups: bool = False


def by_input(diagonal_K: torch.Tensor, length: int) -> torch.Tensor:
    """The largest inputs first, whatever their groups."""
    return torch.argsort(diagonal_K, descending=True, stable=True)


def by_group(diagonal_K: torch.Tensor, length: int) -> torch.Tensor:
    """Whole groups, that of the largest sum first; in a group, the largest inputs first."""
    groups_GL = diagonal_K.view(-1, length)
    inside_GL = torch.argsort(groups_GL, dim=1, descending=True, stable=True)
    first_G = torch.argsort(groups_GL.sum(1), descending=True, stable=True)
    return (inside_GL + torch.arange(len(groups_GL), device=diagonal_K.device)[:, None] * length)[
        first_G
    ].flatten()


ORDERS: dict[str, ColumnOrder] = {
    order.name: order
    for order in (
        ColumnOrder(name="static", columns=by_input),
        # GPTQModel calls it act_group_aware: no index of groups is needed.
        ColumnOrder(name="group-aware", columns=by_group, late_scales=True),
        ColumnOrder(name="act-order", columns=by_input, late_scales=True, regroups=True),
    )
}


def blocks(width: int, length: int, late_scales: bool) -> Iterator[tuple[int, int]]:
    """(begin, end) of runs of columns; none crosses the border of a group with a late scale."""
    span = length if late_scales else width
    for group in range(0, width, span):
        for begin in range(group, min(group + span, width), BLOCK_COLUMNS):
            yield begin, min(begin + BLOCK_COLUMNS, group + span, width)
