"""Launch configs of paged attention: defaults and limits. Times in comments are from an H200."""

from dataclasses import dataclass

from qkernels.gpu.config import is_power, launch_fault, power_of_two


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Launch config for decode and short chunks.

    A block computes block_q rows of all query heads that share a KV head.
    """

    block_m: int  # block_q times the query heads per KV head, padded to a power of two
    block_q: int
    keys: int  # keys per step
    split: int  # split-KV: blocks that share a context
    warps: int
    stages: int
    gluon: bool = False  # sm90_decode_8bit.py: each warp computes 32 keys of a step


# Up to this many rows per KV head, a request is limited by loading keys, not by its products.
DECODE_MAX_ROWS = 32
MAX_SPLIT_KV = 32
GLUON_ROWS = 8  # query rows of a block of sm90_decode_8bit.py: N of mma.m16n8k16

# A shorter split costs more to start and merge than it saves. One request of 2048 keys takes
# 10.8 us with split 16 and 13.4 us with split 8.
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
    gluon: bool = False,  # sm90_decode_8bit.py can run
    int4: bool = False,  # 4-bit pages
    splits: bool = True,  # False: no context is split
) -> AttentionConfig:
    """Choose a config from numbers that the host knows.

    So a CUDA graph that was captured with the config stays valid.
    """
    group = power_of_two(heads_per_kv_head)
    few_rows = group * max_query_len <= DECODE_MAX_ROWS
    programs = max(1, num_requests * num_kv_heads)
    split = 1
    if few_rows and splits:
        visible = min(max_context_len, window or max_context_len)
        # Split the context for up to two blocks per SM. The first split needs two steps of keys;
        # after it, split until each split has one step.
        least = 2 * DECODE_MIN_KEYS_PER_SPLIT
        while (
            2 * split <= MAX_SPLIT_KV and 2 * split * programs <= 2 * sm_count and least <= visible
        ):
            split *= 2
            least = split * DECODE_MIN_KEYS_PER_SPLIT + 1
    # The tensor core takes at least 16 rows; 64 fill the wgmma of one warpgroup. float32 does not
    # use it, and more than 16 rows or 16 keys spill registers (compiled for sm_90).
    most_rows, warps = (16 if element_size == 4 else 64), 4
    if head_dim > 256:  # the sums of 64 rows, or of 32 in 4 warps, spill (compiled for sm_90)
        most_rows, warps = (16, 4) if few_rows or element_size == 4 else (32, 8)
    block_m = max(16, group, min(most_rows, group * power_of_two(max_query_len)))
    # K and V of all stages must leave room in 227 KB of shared memory: 192 KB at the widest.
    if element_size == 4:
        keys, stages = 16, 2
    elif head_dim > 256:
        keys, stages = (32 if most_rows > 16 and page_element_size != 1 else 16), 2
    elif head_dim > 128:
        # with 8-bit codes, 32 keys of a chunk spill during the conversion
        keys, stages = (16 if page_element_size == 1 and block_m == 64 else 32), 3
    elif few_rows and split * programs <= 4 * sm_count:
        # 8 x 4096 keys: 41.7 us, with 64 keys 54; 32 x 4096: 130.6, with 64 keys or 3 stages 140
        keys, stages = 128, (3 if split > 1 else 2)
    elif few_rows:
        keys, stages = 64, 2  # 128 x 4096: 494 us, with 128 keys 504
    else:
        # with 4-bit codes, 64 keys of a chunk spill during the conversion (compiled for sm_90)
        keys, stages = (32 if int4 else 64), 3
    gluon = gluon and takes_gluon(group, max_query_len)
    if gluon:
        block_m, warps = GLUON_ROWS, gluon_warps(programs, sm_count)
        # One warp over 1024 x 192 keys: 122 us with 3 stages, 130 with 2; over 128 x 4096 keys 272
        # and 256. Two warps over 64 x 1024 keys: 42 and 40. 4-bit codes gain from 3 everywhere.
        keys, stages = 32 * warps, 3
        if not int4 and (warps == 2 or (warps == 1 and max_context_len > 512)):
            stages = 2
    return AttentionConfig(
        block_m=block_m,
        block_q=block_m // group,
        keys=keys,
        split=split,
        warps=warps,
        stages=stages,
        gluon=gluon,
    )


def takes_gluon(heads_per_kv_head: int, max_query_len: int) -> bool:
    """Return True if requests have few enough rows for sm90_decode_8bit.py."""
    group = power_of_two(heads_per_kv_head)
    return group <= GLUON_ROWS and group * max_query_len <= 2 * GLUON_ROWS


def gluon_warps(programs: int, sm_count: int) -> int:
    """Return the warps of a block of sm90_decode_8bit.py.

    An SM holds 8 of these warps, in blocks of any size. A block first looks up its request, then
    its pages, and at the end merges its warps. With many small blocks, others load while one waits.
    """
    warps = 4
    while warps > 1 and programs * warps // 2 >= 4 * sm_count:
        warps //= 2
    return warps


PREFILL_ROWS = 128  # query rows per tile of sm90_prefill.py: tokens times heads per KV head
PREFILL_KEYS = 128  # keys per step: 64 take a sixth longer, and 256 do not fit into registers

# pipeline stages of keys and values that fit into shared memory with the queries of two tiles
PREFILL_STAGES = 2

# Keys per step with a head dim above 128: sums of values then take twice the registers, keys take
# twice the memory, and the queries of one tile take as much as two tiles otherwise.
PREFILL_WIDE_KEYS = 64
PREFILL_MAX_SPLIT = 32

# 128 rows over 32768 keys in 32 tiles take 483 us with split 1, 249 with 2, 154 with 4, and 144
# with 8, which makes more tiles than SMs. Shorter splits were not measured.
PREFILL_MIN_KEYS_PER_SPLIT = 1024


def prefill_split(tiles: int, visible: int, sm_count: int) -> int:
    """Return the split-KV of a prompt chunk, above 1 if its tiles leave SMs idle.

    `visible` is the largest number of keys that a row sees.
    """
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
    """Return why the kernel cannot run the config; None: it can."""
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
