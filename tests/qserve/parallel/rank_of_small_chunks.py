"""A rank that sums the results of small products in chunks of few rows."""

import os

from qserve.engine.distributed import rank_process
from qserve.parallel import row_chunks

MIN_ROWS, ALIGNMENT = 8, 2

if __name__ == "__main__":
    row_chunks.MIN_ROWS, row_chunks.ALIGNMENT = MIN_ROWS, ALIGNMENT
    os._exit(rank_process.main())
