"""Sizes and choices of attention in segments of keys."""

from qkernels.attention.config import PREFILL_KEYS

SEGMENT_KEYS = PREFILL_KEYS  # of a segment: a step of sm90_prefill.py
SEGMENT_ROWS = 16  # padded query rows of a program: tokens times heads of a KV head
SEGMENT_MAX_TOKENS = 16  # of a request in a step; more run in sm90_prefill.py
SEGMENT_MAX_HEAD_DIM = 128
PROGRAMS_OF_SM = 3  # 64 KiB of shared memory each, with heads of 128
MAX_PARTIAL_BYTES = 64 << 20


def segment_splits(programs: int, segments: int, partial_bytes: int, sm_count: int) -> int:
    """Programs that share a row's segments, for `programs` of one split each.

    Any choice gives the same bits. 1: one program folds all, without partial sums in memory, of
    which there would be `partial_bytes`.
    """
    if partial_bytes > MAX_PARTIAL_BYTES:
        return 1
    return max(1, min(segments, PROGRAMS_OF_SM * sm_count // programs))
