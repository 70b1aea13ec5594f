"""Configs of W4A16 experts for few tokens on sm_90 (sm90_few_tokens.py). Plain Python.

Legend: M tokens, E experts, k experts of a token, P = M k pairs, N outputs and K inputs of an
expert's product.
"""

from dataclasses import dataclass

from qkernels.gpu.config import MAX_STAGES, CompileTimeConfig, ceil_div
from qkernels.moe.config import MOST_PARTIALS, MOST_PARTS, ExpertsPlan
from qkernels.wna16.layout import TILE_N

K_STEP = 128  # inputs
FEW_TOKENS_ROWS = (8, 16, 32)  # block_m of all configs
REGISTERS_OF_SM = 65536
REGISTERS_OF_THREAD = 232  # that setmaxnreg can give, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class FewTokensConfig(CompileTimeConfig):
    """One launch. A tile is 64 outputs for each consumer, by block_m tokens."""

    block_m: int  # at least M: there is one row of tiles
    num_consumers: int = 2  # warpgroups that multiply
    split: int = 1  # split-K
    stages: int = 4  # of the pipeline, one K step of 128 inputs each
    blocks_per_sm: int = 2

    @property
    def block_n(self) -> int:
        return TILE_N * self.num_consumers

    @property
    def k_subtile(self) -> int:
        """Inputs that are unpacked at once."""
        return 64

    @property
    def registers(self) -> int:
        """Registers per thread at launch, then redistributed between warps.

        The producer's warp counts as a warpgroup.
        """
        threads = self.blocks_per_sm * 128 * (self.num_consumers + 1)
        return min(REGISTERS_OF_THREAD, REGISTERS_OF_SM // threads // 8 * 8)

    @property
    def producer_registers(self) -> int:
        return 40 if self.registers >= 80 and self.block_m < 32 else 24

    @property
    def consumer_registers(self) -> int:
        given = (self.num_consumers + 1) * self.registers - self.producer_registers
        return min(REGISTERS_OF_THREAD, given // self.num_consumers // 8 * 8)


def few_tokens_config_fault(config: FewTokensConfig, *, M: int, N: int, K: int) -> str | None:
    """Why the kernel cannot run it; None: it can."""
    if config.block_m not in FEW_TOKENS_ROWS or config.block_m < M:
        return (
            f"block_m must be of {FEW_TOKENS_ROWS} and at least the {M} tokens,"
            f" found {config.block_m}"
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


def few_tokens_plan(
    *, M: int, top_k: int, num_experts: int, hidden: int, inner: int, sm_count: int
) -> ExpertsPlan | None:
    """None: the kernel does not take M tokens."""
    block_m = next((each for each in FEW_TOKENS_ROWS if each >= M), None)
    sums = top_k * M * hidden  # of one split
    if block_m is None or top_k > MOST_PARTS or sums > MOST_PARTIALS:
        return None
    distinct = min(num_experts, M * top_k)
    splits = min(MOST_PARTS // top_k, MOST_PARTIALS // sums)
    return ExpertsPlan(
        variant="sm90_few_tokens",
        gate_up=_config(block_m, 2 * inner, distinct, sm_count),
        down=_config(block_m, hidden, distinct, sm_count, inner // K_STEP, splits),
        output="parts",
    )


def _config(
    block_m: int, N: int, distinct: int, sm_count: int, steps: int = 1, most_splits: int = 1
) -> FewTokensConfig:
    """Tiles of 64 outputs where tokens are few: the same x is read again for each tile."""
    one = block_m == 8 or N % (2 * TILE_N) != 0
    tiles = distinct * ceil_div(N, TILE_N if one else 2 * TILE_N)
    split = 1
    while (
        2 * split <= most_splits and steps // (2 * split) >= 6 and tiles * 2 * split <= 4 * sm_count
    ):
        split *= 2
    return FewTokensConfig(
        block_m=block_m,
        num_consumers=1 if one else 2,
        split=split,
        stages=6 if one else 4,
        blocks_per_sm=4 if one and block_m == 8 else 2,
    )
