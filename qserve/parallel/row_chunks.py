"""Chunks of rows in which a row-parallel product is computed and its result summed over ranks.

While one chunk is computed, the chunks before it are sent. Only what is sent after the last chunk
costs time.
"""

# Results of fewer rows are summed in one message. More rows than in any CUDA graph
# (graphs/cuda_graphs.py), because a sum in chunks cannot be captured.
MIN_ROWS = 3072
# Chunks end at multiples of this: with 8,192 outputs, 256 rows are 64 tiles of sm90_large_m, so 512
# rows almost fill the 132 SMs of an H200. Other tiles of 64 to 256 rows divide it, too.
ALIGNMENT = 512
# Where chunks end, as fractions of the rows; the last ends with the rows. They become shorter so
# that little is left to send at the end, but not so fast that sending a chunk takes longer than
# computing the next one: for o_proj of Llama-3-70B over two H200s a row takes 0.043 us to send and
# 0.083 us to compute.
ENDS = (0.375, 0.6875, 0.875)


def row_chunks(rows: int) -> list[tuple[int, int]]:
    """Return (start, stop) of each chunk; [] if the rows are too few for several chunks."""
    if rows < MIN_ROWS:
        return []
    ends = {round(rows * end / ALIGNMENT) * ALIGNMENT for end in ENDS}
    # a last chunk of few rows would run another kernel for hardly any gain
    starts = sorted({0, *(end for end in ends if rows - end >= ALIGNMENT // 2)})
    return list(zip(starts, [*starts[1:], rows], strict=True)) if len(starts) > 1 else []
