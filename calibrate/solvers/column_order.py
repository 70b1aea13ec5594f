"""Orders in which GPTQ solves columns, and when it chooses a group's scale.

Late columns compensate the errors of early ones, so columns of large inputs are solved first.

Legend: N outputs, K inputs, L inputs of a group.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

# Columns of a block are rounded one by one; then all later columns are updated together.
BLOCK_COLUMNS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnOrder:
    """A row of ORDERS."""

    name: str
    # (diagonal of H [K], L) -> the columns in solving order, int64 [K]
    columns: Callable[[torch.Tensor, int], torch.Tensor]
    # True: a group's scale is chosen when its first column is solved, for the updated weights.
    # False: all scales are chosen first, for the original weights.
    late_scales: bool = False
    # True: groups consist of columns that are adjacent in this order (act-order). False: groups
    # consist of columns that are adjacent in the model.
    regroups: bool = False


def by_input(diagonal_K: torch.Tensor, length: int) -> torch.Tensor:
    """Largest inputs first, regardless of groups."""
    return torch.argsort(diagonal_K, descending=True, stable=True)


def by_group(diagonal_K: torch.Tensor, length: int) -> torch.Tensor:
    """Whole groups, largest sum first; within a group, largest inputs first."""
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
        # Called act_group_aware in GPTQModel. It needs no group index.
        ColumnOrder(name="group-aware", columns=by_group, late_scales=True),
        ColumnOrder(name="act-order", columns=by_input, late_scales=True, regroups=True),
    )
}


def blocks(width: int, length: int, late_scales: bool) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of blocks of columns. With late scales, no block crosses a group."""
    span = length if late_scales else width
    for group in range(0, width, span):
        for begin in range(group, min(group + span, width), BLOCK_COLUMNS):
            yield begin, min(begin + BLOCK_COLUMNS, group + span, width)
