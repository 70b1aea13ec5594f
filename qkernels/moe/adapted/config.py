"""Tile sizes of the LoRA kernels of experts, in plain Python. Legend: see weights.py; P pairs.

A block computes the pairs of one expert and one adapter within a tile of pairs, as the blocks of
qkernels/lora do within a tile of rows.
"""

from dataclasses import dataclass

from qkernels.gpu.config import ceil_div
from qkernels.lora.config import RANK_BLOCK
from qkernels.moe.config import ExpertsPlan

# Most pairs of a tile if pairs are sorted. Tiles of 64 and more would run as wgmma, which may add
# in another order: with smaller ones, the bits of a pair do not depend on the number of tokens.
MOST_PAIRS = 32
SHRINK_INPUTS = 256  # inputs of a K step of shrink
EXPAND_OUTPUTS = 128  # outputs of a tile of expand
ACTIVATED = 1024  # most outputs of a block of the activation


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTiles:
    """Tiles of pairs, for both LoRA kernels of both products."""

    block_m: int  # pairs of a tile
    by_row: bool  # a tile has one block per pair; False: one per adapter slot
    owners: int  # blocks of a tile


def pair_tiles(plan: ExpertsPlan, num_slots: int) -> PairTiles:
    """Return the tiles for a plan of the portable kernels.

    With the variant `few`, a tile has room for all pairs of an expert.
    """
    block_m = plan.gate_up.block_m
    if plan.variant == "sorted":
        block_m = min(MOST_PAIRS, block_m)
    return PairTiles(block_m=block_m, by_row=block_m < num_slots, owners=min(block_m, num_slots))


def rank_blocks(max_rank: int) -> int:
    return ceil_div(max_rank, RANK_BLOCK)
