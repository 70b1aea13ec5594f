"""Launch configs of paged attention: their defaults and limits. Microseconds are an H200's."""

from dataclasses import dataclass

from qkernels.gpu.config import is_power, launch_fault, power_of_two


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """A launch for decode and short chunks: block_q rows of all heads that share a KV head."""

    block_m: int  # block_q times the query heads of a KV head, padded to a power of two
    block_q: int
    keys: int  # keys of one step
    split: int  # split-KV: blocks that share a context
    warps: int
    stages: int
    gluon: bool = False  # sm90_decode_8bit.py, which has its own keys and warps


# Up to so many rows of a KV head, a request is bound by loading its keys, not by its products.
DECODE_MAX_ROWS = 32
MAX_SPLIT_KV = 32
GLUON_ROWS = 8  # query rows of a block of sm90_decode_8bit.py: N of mma.m16n8k16

# A shorter split costs more to start and to merge than it saves: 1 request of 2048 keys takes
# 10.8 us with split 16, 13.4 us with split 8.
DECODE_MIN_KEYS_PER_SPLIT = 128


def default_attention_config(
    *,
    num_requests: int,
    num_kv_heads: int,
    heads_per_kv_head: int,
    head_dim: int,
    element_size: int,
    page_element_size: int | None = None,  # default: element_size
    max_query_len: int,
    max_context_len: int,
    window: int | None,
    sm_count: int,
    gluon: bool = False,  # whether sm90_decode_8bit.py can run
    int4: bool = False,  # 4-bit pages
) -> AttentionConfig:
    """From host numbers alone, so that a CUDA graph captured with the config stays valid."""
    group = power_of_two(heads_per_kv_head)
    few_rows = group * max_query_len <= DECODE_MAX_ROWS
    programs = max(1, num_requests * num_kv_heads)
    split = 1
    if few_rows:
        visible = min(max_context_len, window or max_context_len)
        # up to two blocks per SM, as long as each split is worth a block, and once there are splits
        # until each has one step
        least = 2 * DECODE_MIN_KEYS_PER_SPLIT
        while (
            2 * split <= MAX_SPLIT_KV and 2 * split * programs <= 2 * sm_count and least <= visible
        ):
            split *= 2
            least = split * DECODE_MIN_KEYS_PER_SPLIT + 1
    # The tensor core takes at least 16 rows; 64 fill one warpgroup's wgmma. float32 does not run on
    # it: more than 16 rows or 16 keys spill registers (compiled for sm_90).
    most_rows, warps = (16 if element_size == 4 else 64), 4
    if head_dim > 256:  # 64 rows, or 32 in 4 warps, spill their sums (compiled for sm_90)
        most_rows, warps = (16, 4) if few_rows or element_size == 4 else (32, 8)
    block_m = max(16, group, min(most_rows, group * power_of_two(max_query_len)))
    # K and V of all stages must leave room in 227 KB of shared memory: 192 KB at the widest.
    if element_size == 4:
        keys, stages = 16, 2
    elif head_dim > 256:
        keys, stages = (32 if most_rows > 16 and page_element_size != 1 else 16), 2
    elif head_dim > 128:
        # 32 keys of a chunk spill where 8-bit codes are converted
        keys, stages = (16 if page_element_size == 1 and block_m == 64 else 32), 3
    elif few_rows and split * programs <= 4 * sm_count:
        # 8 x 4096 keys: 41.7 us, with 64 keys 54; 32 x 4096: 130.6, with 64 keys or 3 stages 140
        keys, stages = 128, (3 if split > 1 else 2)
    elif few_rows:
        keys, stages = 64, 2  # 128 x 4096: 494 us, with 128 keys 504
    else:
        # 64 keys of a chunk spill where 4-bit codes are converted (compiled for sm_90)
        keys, stages = (32 if int4 else 64), 3
    gluon = gluon and group <= GLUON_ROWS and group * max_query_len <= 2 * GLUON_ROWS
    if gluon:
        block_m = GLUON_ROWS
    return AttentionConfig(
        block_m=block_m,
        block_q=block_m // group,
        keys=keys,
        split=split,
        warps=warps,
        stages=stages,
        gluon=gluon,
    )


PREFILL_ROWS = 128  # query rows of a tile of sm90_prefill.py: tokens times heads of a KV head
PREFILL_KEYS = 128  # of one step: 64 take a sixth longer, and 256 do not fit into registers

# as many steps of keys and values as fit into shared memory with the queries of two tiles
PREFILL_STAGES = 2

# Heads of more than 128: sums of values take twice the registers, keys twice the memory, and the
# queries of one tile as much as those of two do otherwise.
PREFILL_WIDE_KEYS = 64
PREFILL_MAX_SPLIT = 32

# 128 rows on 32768 keys, 32 tiles: 483 us with split 1, 249 with 2, 154 with 4, 144 with 8, which
# is more tiles than SMs. Shorter splits were not measured.
PREFILL_MIN_KEYS_PER_SPLIT = 1024


def prefill_split(tiles: int, visible: int, sm_count: int) -> int:
    """Split-KV of a chunk, if its tiles leave SMs idle; a row sees up to `visible` keys."""
    split = 1
    while (
        2 * split <= PREFILL_MAX_SPLIT
        and 2 * split * tiles <= sm_count
        and 2 * split * PREFILL_MIN_KEYS_PER_SPLIT <= visible
    ):
        split *= 2
    return split


def attention_config_fault(
    config: AttentionConfig, *, heads_per_kv_head: int, **_: object
) -> str | None:
    """Why the kernel cannot run the config; None: it can."""
    group = power_of_two(heads_per_kv_head)
    if config.block_m != config.block_q * group:
        return f"block_m must be block_q times {group}, found {config.block_m} and {config.block_q}"
    if config.gluon:
        return "gluon must be False: it is for 8-bit KV, of which no table has configs"
    if not is_power(config.keys, 16, 256):
        return f"keys must be a power of two from 16 to 256, found {config.keys}"
    if not is_power(config.split, 1, MAX_SPLIT_KV):
        return f"split must be a power of two up to {MAX_SPLIT_KV}, found {config.split}"
    return launch_fault(config.block_m, config.warps, config.stages, least=16, most=256)
