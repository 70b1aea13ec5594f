"""Division of a step's requests into decodes, which the scheduler plans first, and prompt chunks.

Attention computes both parts separately (DecodeRows). R: requests.
"""

import numpy as np
import torch

from qkernels.attention.cache import DecodeRows, RequestArrays
from qserve.engine.step.step_input import StepInput
from qserve.engine.step.transfer import to_device


def num_decodes(step: StepInput, decode_query_len: int) -> int:
    """Return the number of decodes: the requests before the first one with more rows than this."""
    is_chunk_R = np.diff(step.query_starts_R1) > decode_query_len
    return int(np.argmax(is_chunk_R)) if is_chunk_R.any() else step.num_requests


def decode_rows(step: StepInput, device: torch.device, decode_query_len: int) -> DecodeRows | None:
    """Return the decodes of a step that also has prompt chunks, which follow the decodes.

    A decode has at most `decode_query_len` rows; if that is 0, every request is a chunk. None: the
    step has no chunk, or no decode.
    """
    count = num_decodes(step, decode_query_len)
    if count in (0, step.num_requests):
        return None
    arrays = (
        step.block_tables_RX[count:].copy(),  # copies have aligned addresses
        step.query_starts_R1[count:] - step.query_starts_R1[count],
        step.context_lengths_R[count:].copy(),
    )
    return DecodeRows(
        num_requests=count,
        num_rows=int(step.query_starts_R1[count]),
        max_query_len=int(np.diff(step.query_starts_R1[: count + 1]).max()),
        max_context_len=int(step.context_lengths_R[:count].max()),
        chunks=RequestArrays(*(to_device(each, device) for each in arrays)),
    )
