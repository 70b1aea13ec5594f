"""Launch configs of latent attention, from numbers of the host alone."""

from collections.abc import Iterator
from dataclasses import dataclass

from qkernels.gpu.config import power_of_two

MAX_SPLIT_KV = 32
MIN_KEYS_PER_SPLIT = 256  # a shorter split costs more to start and to merge than it saves
BLOCK_HEADS = 16  # heads of a program: the least rows of a tensor core's product


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """A launch: block_q query rows of block_heads heads, over one of `split` parts of the keys."""

    block_heads: int
    block_q: int
    keys: int  # keys of one step
    split: int
    warps: int
    stages: int


def default_latent_config(
    *,
    num_requests: int,
    heads: int,
    element_size: int,
    max_query_len: int,
    max_context_len: int,
    sm_count: int,
) -> LatentConfig:
    """From host numbers alone, so that a CUDA graph captured with the config stays valid."""
    block_heads = min(BLOCK_HEADS, power_of_two(heads))
    # 32 rows of a chunk share each entry that they load; 64 spill registers (compiled for sm_90),
    # and with them entries of 576 would not fit into the shared memory of sm_89
    rows = 16 if max_query_len * block_heads <= 16 or element_size == 4 else 32
    block_q = rows // block_heads
    tiles = max(1, num_requests * -(-max_query_len // block_q) * -(-heads // block_heads))
    split = 1
    while (
        2 * split <= MAX_SPLIT_KV
        and 2 * split * tiles <= 2 * sm_count
        and 2 * split * MIN_KEYS_PER_SPLIT <= max_context_len
    ):
        split *= 2
    return LatentConfig(
        block_heads=block_heads,
        block_q=block_q,
        keys=16 if element_size == 4 else 32,
        split=split,
        warps=4 if rows == 16 else 8,
        stages=2,
    )


def latent_boundaries(
    *,
    heads: int,
    element_size: int,
    sm_count: int,
    max_requests: int,
    max_tokens: int,
    max_context_len: int,
) -> Iterator[tuple[int, int, int]]:
    """Return (requests, tokens of each, keys) that together launch every kernel."""
    first: dict[LatentConfig, tuple[int, int, int]] = {}
    for count in (*_powers(1, max_tokens), max_tokens):
        for requests in range(1, min(max_requests, max_tokens // count) + 1):
            for keys in (*_powers(count, max_context_len), max_context_len):
                config = default_latent_config(
                    num_requests=requests,
                    heads=heads,
                    element_size=element_size,
                    max_query_len=count,
                    max_context_len=keys,
                    sm_count=sm_count,
                )
                if keys >= count:
                    first.setdefault(config, (requests, count, keys))
    yield from first.values()


def _powers(least: int, most: int) -> Iterator[int]:
    """Return `least` and its doubles up to `most`."""
    while least <= most:
        yield least
        least *= 2
