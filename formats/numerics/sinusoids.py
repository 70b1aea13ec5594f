"""Sinusoids of positions, which models add to embeddings instead of a learned table.

Legend: P positions, C hidden size.
"""

import math

import torch


def sinusoids(count: int, width: int, zero_row: int | None = None) -> torch.Tensor:
    """Return the table [P, C] in float32, as XGLM has it.

    Its first half is the sines of all frequencies, its second half their cosines (not alternating),
    and an odd width ends in zeros. `zero_row`: a row of zeros, that of the padding token.
    """
    half = width // 2
    rates = torch.exp(torch.arange(half).float() * -(math.log(10000) / max(half - 1, 1)))
    angles_PC = torch.arange(count).float()[:, None] * rates
    table_PC = torch.zeros(count, width)
    table_PC[:, : 2 * half] = torch.cat([angles_PC.sin(), angles_PC.cos()], 1)
    if zero_row is not None and 0 <= zero_row < count:
        table_PC[zero_row] = 0
    return table_PC
