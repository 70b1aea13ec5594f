"""Orders of the rows of q, k and v in GGUF files, and conversion to the family's order.

Legend: H heads, J key/value heads, D rows of a head.

- Rotated pairs: in GGUF, rows 2 i and 2 i + 1 of a head rotate together; in the family's order,
  rows i and i + D/2.
- All queries, then all keys, then all values [(H + 2 J) D] in GGUF; in the family's order, each
  key/value head has its H/J queries, its key and its value together.
"""

import torch


def to_family(rows: torch.Tensor, heads: int, kv_heads: int = 0) -> torch.Tensor:
    """Return rows [N, ...] of a file in the family's order.

    The rows are rotated pairs of `heads` heads or, with `kv_heads`, queries, keys and values.
    """
    if not kv_heads:
        return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()
    parts = rows.unflatten(0, (heads + 2 * kv_heads, -1)).split([heads, kv_heads, kv_heads])
    by_head = [part.unflatten(0, (kv_heads, -1)) for part in parts]
    return torch.cat(by_head, dim=1).flatten(0, 2).contiguous()


def to_gguf(rows: torch.Tensor, heads: int, kv_heads: int = 0) -> torch.Tensor:
    """Return rows of the family in GGUF's order: the inverse of `to_family`."""
    if not kv_heads:
        return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    queries = heads // kv_heads
    by_head = rows.unflatten(0, (kv_heads, queries + 2, -1))
    return torch.cat([part.flatten(0, 2) for part in by_head.split([queries, 1, 1], dim=1)])
