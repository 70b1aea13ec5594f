"""Act-order: inputs of a group that are not adjacent in the file.

Legend: N outputs, K inputs, G groups.
"""

import functools
import math

import torch

from formats.errors import tensor_error


def order_of_groups(
    g_idx: torch.Tensor, num_groups: int, name: str
) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
    """Sort inputs by group into runs of `length`. Returns (order, source, length).

    `order` [K]: the input at each sorted position; None: the identity. `source` [G']: the stored
    group of each run; None: run g is group g. Groups of different sizes are cut into runs of a
    common length. Raises CheckpointError, with `name`, on a bad index.
    """
    if g_idx.ndim != 1 or g_idx.is_floating_point() or not g_idx.numel():
        raise tensor_error(
            f"{name}.g_idx", f"expected integers [K], found {g_idx.dtype} {list(g_idx.shape)}"
        )
    if (
        num_groups
        and not len(g_idx) % num_groups
        and torch.equal(g_idx, _in_order(len(g_idx), num_groups, g_idx.dtype, g_idx.device))
    ):
        return None, None, len(g_idx) // num_groups
    g_idx = g_idx.long()
    if g_idx.min() < 0 or g_idx.max() >= num_groups:
        raise tensor_error(
            f"{name}.g_idx",
            f"expected groups 0..{num_groups - 1}, found {int(g_idx.min())}..{int(g_idx.max())}",
        )
    order = torch.argsort(g_idx, stable=True)
    sizes = torch.bincount(g_idx, minlength=num_groups)
    length = math.gcd(*sizes[sizes > 0].tolist())
    source = torch.arange(num_groups, device=g_idx.device).repeat_interleave(sizes // length)
    if torch.equal(order, torch.arange(len(g_idx), device=g_idx.device)):
        order = None
    if len(source) == num_groups and int(sizes.min()) == length:
        source = None
    return order, source, length


@functools.lru_cache(maxsize=64)
def _in_order(
    num_inputs: int, num_groups: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return the index of groups of adjacent inputs, which most files have."""
    groups = torch.arange(num_groups, dtype=dtype, device=device)
    return groups.repeat_interleave(num_inputs // num_groups)
