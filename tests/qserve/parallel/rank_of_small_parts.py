"""A rank that computes a step in parts of few tokens, where stages can compute them at once."""

import os

from qserve.engine import microbatches, rank_process

MIN_TOKENS = 4

if __name__ == "__main__":
    microbatches.MIN_TOKENS = MIN_TOKENS
    os._exit(rank_process.main())
