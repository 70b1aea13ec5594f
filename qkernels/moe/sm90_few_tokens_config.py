"""Configs of W4A16 experts for few tokens on sm_90 (sm90_few_tokens.py), in plain Python.

Legend: M tokens, E experts, k experts per token, P = M k pairs, N outputs and K inputs of an
expert's product.
"""

import math
from dataclasses import dataclass

from qkernels.gpu.config import MAX_STAGES, SM_REGISTERS, CompileTimeConfig
from qkernels.moe.config import MAX_PARTIALS, MAX_PARTS, ExpertsPlan
from qkernels.wna16.layout import TILE_N, k_step

K_STEP = 128  # inputs per K step
SMALL_GROUPS = (64, 32)  # groups with several scales in a K step; others fill K steps
FEW_TOKENS_ROWS = (8, 16, 32)  # possible values of block_m
# Columns of a tile -> largest average number of pairs per expert for which it is chosen. An expert
# with more pairs than columns takes another entry, and its weights are read again, from the L2.
MAX_ROWS = {8: 5, 16: 11, 32: 40}
MAX_PAIRS = 1024  # most pairs, which each block of active_pairs searches
REGISTERS_OF_THREAD = 232  # most registers per thread that setmaxnreg is given


@dataclass(frozen=True, slots=True, kw_only=True)
class FewTokensConfig(CompileTimeConfig):
    """Launch config of one product. A tile is 64 outputs per consumer by block_m columns."""

    block_m: int  # columns: at least M tokens; or sorted pairs
    sorts: bool = False  # pairs are sorted by expert, and their tokens are gathered
    num_consumers: int = 2  # consumer warpgroups
    split: int = 1  # split-K
    stages: int = 4  # pipeline stages, one K step of 128 inputs each
    blocks_per_sm: int = 2

    @property
    def block_n(self) -> int:
        return TILE_N * self.num_consumers

    @property
    def k_subtile(self) -> int:
        """Inputs that are unpacked together; groups of 32 one by one."""
        return 64

    @property
    def registers(self) -> int:
        """Registers per thread at launch; the warps redistribute them.

        The producer's warp counts as a warpgroup.
        """
        threads = self.blocks_per_sm * 128 * (self.num_consumers + 1)
        return min(REGISTERS_OF_THREAD, SM_REGISTERS // threads // 8 * 8)

    @property
    def producer_registers(self) -> int:
        return 40 if self.registers >= 80 and self.block_m < 32 else 24

    @property
    def consumer_registers(self) -> int:
        given = (self.num_consumers + 1) * self.registers - self.producer_registers
        return min(REGISTERS_OF_THREAD, given // self.num_consumers // 8 * 8)


def group_fault(group: int) -> str | None:
    """Return why the kernel cannot run groups of this many inputs; None: it can."""
    if k_step(group) == K_STEP or group in SMALL_GROUPS:
        return None
    return f"takes groups of 32, 64 or multiples of {K_STEP}, found {group}"


def few_tokens_config_fault(config: FewTokensConfig, *, M: int, N: int, K: int) -> str | None:
    """Return why the kernel cannot run the config; None: it can."""
    if config.block_m not in FEW_TOKENS_ROWS or (config.block_m < M and not config.sorts):
        return (
            f"block_m must be of {FEW_TOKENS_ROWS}, and at least the {M} tokens unless pairs are"
            f" sorted, found {config.block_m}"
        )
    if config.num_consumers not in (1, 2) or N % config.block_n:
        return (
            f"num_consumers must be 1 or 2, and {N} outputs divisible by 64 times that,"
            f" found {config.num_consumers}"
        )
    if not 1 <= config.split <= K // K_STEP or not 2 <= config.stages <= MAX_STAGES:
        return (
            f"split must be 1 to {K // K_STEP}, the number of K steps, and stages 2 to"
            f" {MAX_STAGES}, found {config.split} and {config.stages}"
        )
    if config.blocks_per_sm not in (1, 2, 3, 4):
        return f"blocks_per_sm must be 1 to 4, found {config.blocks_per_sm}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FewTokensTiles:
    """Configs of both products of a layer, as the tuning table stores them."""

    block_m: int
    sorts: bool
    gate_up_consumers: int
    gate_up_stages: int
    gate_up_blocks_per_sm: int
    down_consumers: int
    down_stages: int
    down_blocks_per_sm: int
    down_split: int

    @property
    def gate_up(self) -> FewTokensConfig:
        return FewTokensConfig(
            block_m=self.block_m,
            sorts=self.sorts,
            num_consumers=self.gate_up_consumers,
            stages=self.gate_up_stages,
            blocks_per_sm=self.gate_up_blocks_per_sm,
        )

    @property
    def down(self) -> FewTokensConfig:
        return FewTokensConfig(
            block_m=self.block_m,
            sorts=self.sorts,
            num_consumers=self.down_consumers,
            stages=self.down_stages,
            blocks_per_sm=self.down_blocks_per_sm,
            split=self.down_split,
        )

    def plan(self, *, M: int, top_k: int, hidden: int) -> ExpertsPlan:
        parts = max_splits(M=M, top_k=top_k, hidden=hidden) > 0
        return ExpertsPlan(
            variant="sm90_few_tokens",
            gate_up=self.gate_up,
            down=self.down,
            output="parts" if parts else "sum",
        )


def max_splits(*, M: int, top_k: int, hidden: int) -> int:
    """Return the largest split of down that the next norm adds; 0: a separate kernel must add."""
    return min(MAX_PARTS // top_k, MAX_PARTIALS // (top_k * M * hidden))


def few_tokens_tiles(
    *, M: int, top_k: int, num_experts: int, hidden: int, inner: int, sm_count: int
) -> FewTokensTiles | None:
    """Return the default configs; None: the kernel does not take M tokens."""
    pairs = M * top_k
    sorts = FEW_TOKENS_ROWS[0] < M
    rows = pairs / num_experts if sorts else 1
    block_m = next((each for each, most in MAX_ROWS.items() if rows <= most), None)
    if block_m is None or pairs > MAX_PAIRS:
        return None
    # tiles of 64 outputs only if x is small, because every tile reads x again
    gate_up, down = (1 if block_m == 8 or N % (2 * TILE_N) else 2 for N in (2 * inner, hidden))
    stages, blocks_per_sm = (6, 4) if block_m == 8 else (4, 2)
    active = num_experts * (1 - (1 - top_k / num_experts) ** M)  # expected active experts
    tiles = active * hidden / (TILE_N * down)
    splits = max_splits(M=M, top_k=top_k, hidden=hidden)
    return FewTokensTiles(
        block_m=block_m,
        sorts=sorts,
        gate_up_consumers=gate_up,
        gate_up_stages=stages,
        gate_up_blocks_per_sm=blocks_per_sm,
        down_consumers=down,
        down_stages=stages,
        down_blocks_per_sm=blocks_per_sm,
        down_split=_down_split(tiles / sm_count, inner // K_STEP, splits),
    )


def few_tokens_tiles_fault(
    tiles: FewTokensTiles,
    *,
    M: int,
    top_k: int,
    num_experts: int,
    hidden: int,
    inner: int,
    group: int,
) -> str | None:
    """Return why the kernel cannot run these configs; None: it can."""
    fault = group_fault(group)
    if fault is not None:
        return fault
    if M * top_k > MAX_PAIRS:
        return f"takes up to {MAX_PAIRS} pairs, found {M} tokens of {top_k} experts"
    splits = max(1, max_splits(M=M, top_k=top_k, hidden=hidden))
    if tiles.down_split > splits:
        return f"the next norm adds the parts of split {splits} at most, found {tiles.down_split}"
    return few_tokens_config_fault(
        tiles.gate_up, M=M, N=2 * inner, K=hidden
    ) or few_tokens_config_fault(tiles.down, M=M, N=hidden, K=inner)


def _down_split(tiles_of_sm: float, steps: int, most: int) -> int:
    """Return the split that gives the SMs equal work.

    It prefers three blocks or more per SM and needs 6 K steps or more per split.
    """

    def cost(split: int) -> float:
        work = tiles_of_sm * split
        return math.ceil(work) / work + 0.1 * max(0.0, 3 - work) + 0.02 * split

    splits = [split for split in (2, 4) if split <= most and steps // split >= 6]
    return min([1, *splits], key=cost)
