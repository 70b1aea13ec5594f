"""Convert rows and columns of recurrent layers between a file's and the family's order.

converted.Order describes the order of a file.
"""

import torch

from formats.gguf.architectures.converted import Order


def from_file(rows: torch.Tensor, order: Order | None, dim: int = 0) -> torch.Tensor:
    """Return rows [N, ...] of a file, or columns with `dim` 1, in the family's order."""
    return rows if order is None else rows.index_select(dim, _index(order, rows.shape[dim]))


def to_file(rows: torch.Tensor, order: Order | None, dim: int = 0) -> torch.Tensor:
    """Return rows of the family in the file's order: the inverse of `from_file`."""
    if order is None:
        return rows
    return rows.index_select(dim, _index(order, rows.shape[dim]).argsort())


def in_steps(order: Order | None, step: int) -> Order | None:
    """Return the order for runs of `step` columns, which move as whole blocks."""
    if order is None:
        return None
    kept, groups, each, width = order.numbers
    return Order(order.kind, (kept // step, groups, each, width // step))


def _index(order: Order, count: int) -> torch.Tensor:
    """Return the index in the file of each row of the family's order."""
    if order.kind == "grouped":
        groups, *widths = order.numbers
        parts = torch.arange(count).split([groups * width for width in widths])
        return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten()
    if order.kind == "paired":
        heads, rotated, width = order.numbers
        within = torch.arange(width)
        within[:rotated] = torch.arange(rotated).unflatten(0, (-1, 2)).T.flatten()
        return (torch.arange(heads).unsqueeze(1) * width + within).flatten()
    kept, groups, each, width = order.numbers
    moved = torch.arange(kept, count).unflatten(0, (each, groups, width)).transpose(0, 1)
    return torch.cat([torch.arange(kept), moved.flatten()])
