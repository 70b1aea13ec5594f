"""Sizes and configs of batch-invariant attention, which computes in segments of keys."""

from dataclasses import dataclass

from qkernels.attention.config import PREFILL_KEYS
from qkernels.gpu.config import power_of_two

SEGMENT_KEYS = PREFILL_KEYS  # keys per segment: one step of sm90_prefill.py
SEGMENT_ROWS = 16  # padded query rows per program: tokens times heads per KV head
SEGMENT_MAX_TOKENS = 16  # tokens of a request in a step; more run in sm90_prefill.py
SEGMENT_MAX_HEAD_DIM = 128
PROGRAMS_OF_SM = 3  # programs per SM; each uses 64 KiB of shared memory with a head dim of 128
MAX_PARTIAL_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """Launch config of triton_segments.py."""

    block_q: int  # query rows per program
    keys: int  # keys per step; divides a segment
    warps: int
    stages: int


def tile_config(
    *, heads_per_kv_head: int, head_dim: int, element_size: int, max_query_len: int
) -> TileConfig:
    """Return a config with at least 16 rows times heads for decode, and 32 for prompts.

    `keys` depends only on the model. From 64 rows on, sm_90 and sm_100 use other tensor core
    instructions, whose sums have another order.
    """
    group = power_of_two(heads_per_kv_head)
    most = 16 if element_size == 4 else 32
    few = max(16, group)
    rows = few if max_query_len * group <= few else max(group, most)
    return TileConfig(
        block_q=rows // group,
        keys=16 if element_size == 4 else 32 if head_dim > 128 else 64,
        warps=8 if rows >= 64 else 4,
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
