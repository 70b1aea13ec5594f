"""Configs of batch-invariant latent attention and of its products by head."""

from collections.abc import Iterator
from dataclasses import dataclass

from qkernels.gpu.config import ceil_div, power_of_two
from qkernels.latent.config import LARGE_SHARED

SEGMENT_KEYS = 256
MAX_PARTIAL_BYTES = 128 << 20
PROGRAMS_OF_SM = 2  # programs per SM
MIN_ROWS_OF_TILE, MAX_ROWS_OF_TILE = 16, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentConfig:
    """Tile of query rows times heads; every step of a model on one GPU uses the same."""

    block_heads: int
    block_q: int
    keys: int  # keys per step; divides a segment
    warps: int
    stages: int


def segment_config(*, heads: int, element_size: int, shared_bytes: int) -> SegmentConfig:
    """Return the config. It depends only on the model and the GPU.

    The bits depend on `keys`, because the largest score is updated after each step of keys.
    """
    is_large = shared_bytes >= LARGE_SHARED and element_size < 4
    rows = 16 if element_size == 4 else 32
    block_heads = min(32 if is_large else 16, power_of_two(heads))
    return SegmentConfig(
        block_heads=block_heads,
        block_q=rows // block_heads,
        keys=16 if element_size == 4 else 64 if is_large else 32,
        warps=4 if element_size == 4 else 8,
        stages=2,
    )


def segment_splits(programs: int, segments: int, partial_bytes: int, sm_count: int) -> int:
    """Return the number of programs that share a row's segments. Every choice gives the same bits.

    `programs` is the number of programs without a split. 1: a program folds all segments of its
    rows and needs no partial sums in memory; otherwise they take `partial_bytes`.
    """
    if partial_bytes > MAX_PARTIAL_BYTES:
        return 1
    return max(1, min(segments, PROGRAMS_OF_SM * sm_count // programs))


def rows_of_tile(T: int) -> int:
    """Return the rows of a tile of the products by head; every tile gives the same bits."""
    return min(MAX_ROWS_OF_TILE, max(MIN_ROWS_OF_TILE, power_of_two(T)))


def segment_boundaries(
    *, max_requests: int, max_tokens: int, max_context_len: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (requests, tokens per request, keys) that together launch every kernel."""
    longest = min(max_tokens, max_context_len)
    for rows in (16, 32, 64, 128):  # tile sizes of the products by head
        if rows <= longest:
            yield 1, rows, rows
    yield 1, 1, max_context_len  # several programs share the row
    yield 1, longest, max_context_len
    yield min(max_requests, max_tokens), 1, 1


def blocks_of(T: int, requests: int, heads: int, config: SegmentConfig) -> tuple[int, int]:
    """Return the grid: (blocks of rows, blocks of heads)."""
    return T // config.block_q + requests, ceil_div(heads, config.block_heads)
