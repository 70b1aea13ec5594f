"""A rank that splits a step into small microbatches, so that stages compute in parallel."""

import os

from qserve.engine.distributed import rank_process
from qserve.engine.runner import microbatches

MIN_TOKENS = 4

if __name__ == "__main__":
    microbatches.MIN_TOKENS = MIN_TOKENS
    os._exit(rank_process.main())
