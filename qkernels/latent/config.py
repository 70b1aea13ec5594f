"""Launch configs of latent attention, chosen from numbers that the host knows."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial

from qkernels.attention.config import PREFILL_ROWS, default_attention_config, prefill_split
from qkernels.gpu.config import ceil_div, power_of_two
from qkernels.latent.expanded import BLOCK_HEADS, heads_of_group

MAX_SPLIT_KV = 32
LARGE_SHARED = 200_000  # bytes of shared memory per block; sm_90 and sm_100 have 232,448
USUAL_ENTRY = 640  # numbers of an entry up to which the usual configs fit into shared memory
MIN_KEYS_PER_SPLIT = 256  # a shorter split costs more to start and merge than it saves


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Launch config: a program does block_q query rows of block_heads heads over one KV split."""

    block_heads: int
    block_q: int
    keys: int  # keys per step
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
    shared_bytes: int,
    entry: int = USUAL_ENTRY,
) -> LatentConfig:
    """Choose a config from numbers that the host knows. `entry`: numbers of an entry.

    So a CUDA graph that was captured with the config stays valid.
    """
    # 64 keys and 32 rows of 576 numbers take 115 KB; measured only on sm_90
    is_wide = entry > USUAL_ENTRY
    is_large = shared_bytes >= LARGE_SHARED and element_size < 4 and not is_wide
    block_heads = min(2 * BLOCK_HEADS if is_large else BLOCK_HEADS, power_of_two(heads))
    # 32 rows share each loaded entry; 64 rows would spill registers (compiled for sm_90)
    rows = 16 if max_query_len * block_heads <= 16 or element_size == 4 or is_wide else 32
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
        # 128 requests of 4,096 keys. With 32 rows: 289 us with 64 keys, 447 us with 32 keys. With
        # 16 rows: 301 and 228 us.
        keys=16 if element_size == 4 or is_wide else 64 if is_large and rows == 32 else 32,
        split=split,
        warps=4 if rows == 16 and not is_wide else 8,
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
    shared_bytes: int,
    entry: int = USUAL_ENTRY,
) -> Iterator[tuple[int, int, int]]:
    """Yield (requests, tokens per request, keys) that together launch every kernel."""
    config_of = partial(
        default_latent_config,
        heads=heads,
        element_size=element_size,
        sm_count=sm_count,
        shared_bytes=shared_bytes,
        entry=entry,
    )
    return boundaries_of(
        config_of,
        max_requests=max_requests,
        max_tokens=max_tokens,
        max_context_len=max_context_len,
    )


def boundaries_of(
    config_of: Callable[..., Hashable],
    *,
    max_requests: int,
    max_tokens: int,
    max_context_len: int,
) -> Iterator[tuple[int, int, int]]:
    """Yield (requests, tokens per request, keys) that together have every config.

    `config_of` returns the config of such a step; it takes num_requests, max_query_len and
    max_context_len.
    """
    first: dict[Hashable, tuple[int, int, int]] = {}
    for count in (*_powers(1, max_tokens), max_tokens):
        for requests in range(1, min(max_requests, max_tokens // count) + 1):
            for keys in (*_powers(count, max_context_len), max_context_len):
                if keys >= count:
                    config = config_of(
                        num_requests=requests, max_query_len=count, max_context_len=keys
                    )
                    first.setdefault(config, (requests, count, keys))
    yield from first.values()


def selected_boundaries(
    *,
    heads: int,
    element_size: int,
    sm_count: int,
    most: int,
    max_tokens: int,
    max_context_len: int,
    shared_bytes: int,
    entry: int = USUAL_ENTRY,
) -> Iterator[tuple[int, int, int]]:
    """Yield (1, rows, keys) that together launch every kernel over selected keys.

    A row has up to `most` selected keys.
    """
    first: dict[LatentConfig, tuple[int, int, int]] = {}
    for rows in (*_powers(1, max_tokens), max_tokens):
        keys = max(rows, most + 1)
        config = default_latent_config(
            num_requests=rows,
            heads=heads,
            element_size=element_size,
            max_query_len=1,
            max_context_len=most,
            sm_count=sm_count,
            shared_bytes=shared_bytes,
            entry=entry,
        )
        if keys <= max_context_len:
            first.setdefault(config, (1, rows, keys))
    yield from first.values()


def expanded_boundaries(
    *,
    heads: int,
    width: int,
    element_size: int,
    sm_count: int,
    min_rows: int,
    min_pairs: int,
    max_tokens: int,
    max_context_len: int,
) -> Iterator[tuple[int, int, int]]:
    """Yield (requests, tokens per request, keys) that launch every kernel over expanded keys.

    `width` is the width of an expanded key and value. A chunk is expanded from `min_rows` rows and
    `min_pairs` pairs of row and key on.
    """
    first: dict[object, tuple[int, int, int]] = {}
    for count in (*_powers(min_rows, max_tokens), max_tokens):
        for keys in (*_powers(count, max_context_len), max_context_len):
            if min_rows <= count <= keys and count * keys >= min_pairs:
                key = expanded_kernels(
                    heads=heads,
                    width=width,
                    element_size=element_size,
                    sm_count=sm_count,
                    rows=count,
                    keys=keys,
                )
                first.setdefault(key, (1, count, keys))
    yield from first.values()


def expanded_kernels(
    *, heads: int, width: int, element_size: int, sm_count: int, rows: int, keys: int
) -> object:
    """Return a key of the kernels that `rows` rows over `keys` expanded keys launch."""
    group = heads_of_group(heads=heads, keys=keys, width=width, element_size=element_size)
    portable = default_attention_config(
        num_requests=1,
        num_kv_heads=group,
        heads_per_kv_head=1,
        head_dim=width,
        element_size=element_size,
        max_query_len=rows,
        max_context_len=keys,
        window=None,
        sm_count=sm_count,
    )
    return group, prefill_split(ceil_div(rows, PREFILL_ROWS) * group, keys, sm_count), portable


def _powers(least: int, most: int) -> Iterator[int]:
    """Yield `least` and its doubles up to `most`."""
    while least <= most:
        yield least
        least *= 2
