"""Division of a step's requests into decodes, which the scheduler plans first, and prompt chunks.

Attention computes both parts separately (DecodeRows). R: requests.
"""

import numpy as np
import torch

from qkernels.attention.cache import DecodeRows
from qserve.engine.step.step_input import StepInput
from qserve.engine.step.transfer import to_device


def decode_rows(step: StepInput, device: torch.device, max_rows: int) -> DecodeRows | None:
    """Return the decodes of a step that also has prompt chunks, which follow the decodes.

    A decode has at most `max_rows` rows. None: the step has no chunk, or begins with one.
    """
    if step.max_query_len <= max_rows:
        return None
    counts_R = np.diff(step.query_starts_R1)
    count = int(np.argmax(counts_R > max_rows))
    if count == 0:
        return None
    starts_R1 = step.query_starts_R1[count:]
    return DecodeRows(
        num_requests=count,
        num_rows=int(starts_R1[0]),
        max_query_len=int(counts_R[:count].max()),
        max_context_len=int(step.context_lengths_R[:count].max()),
        chunk_starts_R1=to_device(starts_R1 - starts_R1[0], device),
    )
