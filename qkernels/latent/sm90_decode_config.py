"""Launch configs of sm90_decode.py, chosen from numbers that the host knows. It needs no triton."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from qkernels.gpu.config import ceil_div, power_of_two
from qkernels.latent.config import MAX_SPLIT_KV, boundaries_of

STEP_KEYS = 64  # keys of a step: M of a wgmma
STEP_STAGES = 2  # 72 KB each; a third would leave no room for the queries
CHUNK_WIDTH = 64  # 16-bit numbers of a TMA box: 128 bytes, the widest swizzle
LATENT_WIDTHS = (128, 256, 512)  # two warpgroups multiply 128 rows together
PAGE_SIZES = (16, 32, 64, 128)
MAX_COLUMNS = 64  # sums of 64 columns take 128 registers of the 256 threads that hold them
MIN_COLUMNS = 16
LOAD_REGISTERS = 40  # per thread of the warps that load
MIN_SPLIT_KEYS = 128  # two steps: both stages are loaded together

# Estimated costs (not measured), as the number of keys whose entries a block could load meanwhile:
# to start a block and fill its pipeline; per column, to write a split's sums and read them in the
# merge.
BLOCK_START_KEYS = 128
MERGE_KEYS_PER_COLUMN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm90LatentConfig:
    """Launch config: a block computes block_q query rows of block_heads heads over one KV split."""

    block_heads: int
    block_q: int
    split: int

    @property
    def columns(self) -> int:
        return self.block_heads * self.block_q

    @property
    def value_warps(self) -> int:
        """Warps that sum values: two warpgroups for 64 columns, else one."""
        return 8 if self.columns > 32 else 4

    @property
    def registers(self) -> int:
        """Registers per thread at launch; warps redistribute them."""
        return 128 if self.columns > 32 else 168

    @property
    def score_registers(self) -> int:
        return 136 if self.columns > 32 else 168


def sm90_latent_config(
    *,
    num_requests: int,
    heads: int,
    max_query_len: int,
    max_context_len: int,
    sm_count: int,
) -> Sm90LatentConfig:
    """Choose a config from numbers that the host knows, as default_latent_config does.

    One block runs on an SM at a time, so the splits are as many as take the least time in whole
    waves.
    """
    block_heads = min(MAX_COLUMNS, power_of_two(heads))
    block_q = min(MAX_COLUMNS // block_heads, power_of_two(max_query_len))
    block_q = max(block_q, MIN_COLUMNS // block_heads)
    tiles = num_requests * ceil_div(max_query_len, block_q) * ceil_div(heads, block_heads)
    merge_keys = MERGE_KEYS_PER_COLUMN * block_heads * block_q

    def keys_of_waves(split: int) -> int:
        per_block = ceil_div(max_context_len, split) + BLOCK_START_KEYS
        return ceil_div(max(1, tiles) * split, sm_count) * (
            per_block + (merge_keys if split > 1 else 0)
        )

    splits = [1]
    while 2 * splits[-1] <= min(MAX_SPLIT_KV, max_context_len // MIN_SPLIT_KEYS):
        splits.append(2 * splits[-1])
    return Sm90LatentConfig(
        block_heads=block_heads, block_q=block_q, split=min(splits, key=keys_of_waves)
    )


def sm90_latent_boundaries(
    *, heads: int, sm_count: int, max_requests: int, max_tokens: int, max_context_len: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (requests, tokens per request, keys) that together launch every kernel."""
    return boundaries_of(
        partial(sm90_latent_config, heads=heads, sm_count=sm_count),
        max_requests=max_requests,
        max_tokens=max_tokens,
        max_context_len=max_context_len,
    )
