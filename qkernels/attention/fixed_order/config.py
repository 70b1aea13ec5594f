"""Sizes and choices of attention in segments of keys."""

from dataclasses import dataclass

from qkernels.attention.config import PREFILL_KEYS
from qkernels.gpu.config import power_of_two

SEGMENT_KEYS = PREFILL_KEYS  # of a segment: a step of sm90_prefill.py
SEGMENT_ROWS = 16  # padded query rows of a program: tokens times heads of a KV head
SEGMENT_MAX_TOKENS = 16  # of a request in a step; more run in sm90_prefill.py
SEGMENT_MAX_HEAD_DIM = 128
PROGRAMS_OF_SM = 3  # 64 KiB of shared memory each, with heads of 128
MAX_PARTIAL_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """A launch of triton_segments.py."""

    block_q: int  # query rows of a program
    keys: int  # of a step: divides a segment
    warps: int
    stages: int


def tile_config(
    *, heads_per_kv_head: int, head_dim: int, element_size: int, max_query_len: int
) -> TileConfig:
    """16 rows times heads for decodes, 32 for prompts. `keys` follow from the model alone.

    From 64 rows on, sm_90 and sm_100 multiply in other units: their sums have another order.
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
    """Programs that share a row's segments, for `programs` of one split each.

    Any choice gives the same bits. 1: one program folds all, without partial sums in memory, of
    which there would be `partial_bytes`.
    """
    if partial_bytes > MAX_PARTIAL_BYTES:
        return 1
    return max(1, min(segments, PROGRAMS_OF_SM * sm_count // programs))
