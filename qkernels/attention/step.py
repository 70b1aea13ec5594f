"""The rows and contexts of one step. Legend: R requests, X pages of a block table."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStep:
    """Which rows of q are whose, and where their keys are.

    The maxima are upper bounds that the host knows, so that nothing is read back from the device;
    in a CUDA graph they are frozen.
    """

    block_tables_RX: torch.Tensor  # int32: the pages of each request, in order
    query_starts_R1: torch.Tensor  # int32 [R + 1]: request r has rows starts[r] .. starts[r + 1]
    context_lengths_R: torch.Tensor  # int32: keys that a request's last row sees, itself included
    max_query_len: int
    max_context_len: int
    # int64 [T]: position of the last key that each row sees, at most that of the request's last
    # row; None: its own. Plain torch alone computes it.
    last_keys_T: torch.Tensor | None = None
