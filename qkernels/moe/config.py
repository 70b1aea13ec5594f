"""Plans and launch configs for running M tokens through the experts of a layer, in plain Python.

Legend: M tokens, E experts, k experts per token, P = M k pairs of token and expert, N outputs and K
inputs of a product.
"""

from dataclasses import dataclass
from typing import Literal

from qkernels.gpu.config import power_of_two

# With more tokens than this, pairs are sorted by expert first. Otherwise each block of the product
# finds the tokens of its expert itself, and a tile has room for all tokens.
FEW_TOKENS = 32
FEW_PAIRS = 256  # most pairs that a block searches
# With more elements of partial sums than this (4 MiB), a separate kernel adds them.
MAX_PARTIALS = 2**20
MAX_PARTS = 16  # most partial sums that the norm after the experts adds
MIN_ROWS = 16  # rows of the smallest tile of tokens that a tensor core takes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Launch config of one product. The grid is [blocks of pairs, N / block_n, split]."""

    block_m: int  # pairs per block
    block_n: int  # outputs per block
    split: int = 1  # split-K
    warps: int = 4
    stages: int = 3
    pdl: bool = False  # programmatic dependent launch


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsPlan:
    """How M tokens run: the variant, the configs of both products, the form of the output."""

    variant: str  # a row of variants.py, or "reference"
    gate_up: object | None = None  # launch config of the first product, if the variant has one
    down: object | None = None
    # parts: partial sums [split k, M, C], which the next norm adds
    output: Literal["parts", "sum"] = "sum"


def few_plan(
    *, M: int, top_k: int, num_experts: int, hidden: int, inner: int, sm_count: int
) -> ExpertsPlan | None:
    """Return the plan of the portable kernels in which each block finds its tokens itself.

    None: there are too many tokens.
    """
    pairs = M * top_k
    if M > FEW_TOKENS or pairs > FEW_PAIRS:
        return None
    block_m = max(MIN_ROWS, power_of_two(M))
    distinct = min(num_experts, pairs)
    one = ExpertsConfig(block_m=block_m, block_n=64, stages=4, pdl=True)
    split = _down_split(distinct * (hidden // 64), inner // 128, top_k, M * hidden, sm_count)
    down = ExpertsConfig(block_m=block_m, block_n=64, split=split, stages=4, pdl=True)
    if split * top_k * M * hidden <= MAX_PARTIALS and split * top_k <= MAX_PARTS:
        return ExpertsPlan(variant="few", gate_up=one, down=down, output="parts")
    return ExpertsPlan(variant="few", gate_up=one, down=one)


def sorted_plan(
    *, M: int, top_k: int, num_experts: int, shared_bytes: int, packed: bool
) -> ExpertsPlan:
    """Return the plan of the portable kernels for any number of tokens, with sorted pairs.

    `packed`: 4- or 8-bit weights with 16-bit activations. `shared_bytes`: limit of one block.
    """
    config = _sorted_config(M * top_k / num_experts, packed, shared_bytes)
    return ExpertsPlan(variant="sorted", gate_up=config, down=config)


def _down_split(tiles: int, steps: int, top_k: int, sums: int, sm_count: int) -> int:
    """Return the largest split with 8 K steps or more per block and at most four blocks per SM."""
    for split in (8, 7, 6, 5, 4, 3, 2):
        if (
            steps // split >= 8
            and tiles * split <= 4 * sm_count
            and split * top_k <= MAX_PARTS
            and split * top_k * sums <= MAX_PARTIALS
        ):
            return split
    return 1


def _sorted_config(rows: float, packed: bool, shared_bytes: int) -> ExpertsConfig:
    """Return the config for `rows` pairs per expert on average."""
    block_m = next((each for each in (16, 32, 64) if rows <= 0.75 * each), 128)
    # packed: a stage has 128 inputs of x in 16 bits, and of W in at most 8 bits.
    # Otherwise: 64 inputs of both in 16 bits, or 128 in 8 bits.
    of_stage = 2 * block_m * 128 + 64 * 128 if packed else (block_m + 64) * 128
    stages = 3 if packed and block_m == 128 else 4
    return ExpertsConfig(
        block_m=block_m, block_n=64, stages=max(2, min(stages, shared_bytes // of_stage))
    )


def sort_chunk(pairs: int) -> int:
    """Return the number of pairs that a block of the sort reads at a time."""
    return min(2048, max(128, power_of_two(pairs)))


def num_blocks(config: ExpertsConfig, pairs: int, num_experts: int) -> int:
    """Return an upper bound of the blocks of pairs, for any choice of experts."""
    return tiles_of_pairs(pairs, num_experts, config.block_m)


def tiles_of_pairs(pairs: int, num_experts: int, block_m: int) -> int:
    """Return an upper bound of the tiles of pairs of one expert, for any choice of experts."""
    return (pairs + min(num_experts, pairs) * (block_m - 1)) // block_m


def fits(hidden: int, inner: int, gated: bool) -> str | None:
    """Return why the kernels cannot tile these sizes; None: they can."""
    divisor = 32 if gated else 64
    if hidden % 64 or inner % divisor:
        return (
            f"takes a hidden size divisible by 64 and an inner one by {divisor}, not {hidden},"
            f" {inner}"
        )
    return None
