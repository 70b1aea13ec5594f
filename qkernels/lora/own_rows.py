"""Triton device function that finds the rows of a block's adapter within a tile."""

import triton
import triton.language as tl


@triton.jit
def own_slot(slots, row, owner, BY_ROW: tl.constexpr):
    """Return (mask of the rows of this block's adapter, the adapter's slot).

    `slots`: of the tile's rows, which are numbered by `row`. Slot -1: the block has nothing to do.
    BY_ROW: a block belongs to a row, and works only if this is its adapter's first row in the tile;
    otherwise a block belongs to a slot.
    """
    slot = owner
    if BY_ROW:
        slot = tl.max(tl.where(row == owner, slots, -1), 0)
        before = tl.sum(((slots == slot) & (row < owner)).to(tl.int32), 0)
        slot = tl.where(before > 0, -1, slot)
    own = (slots == slot) & (slots >= 0)
    return own, tl.where(tl.sum(own.to(tl.int32), 0) > 0, slot, -1)
