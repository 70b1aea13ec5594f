"""Operations on states with each row computed alone, for a CPU in fixed order.

A row's bits then depend on its request's rows before it alone: the states and the shapes are the
same in a prompt, in chunks of any length, and in a decode.
"""

from collections.abc import Callable, Sequence

import torch

from qkernels.causal_conv.state import StateStep, requests_of

# tensors of one row, states [1, ...] that are changed in place, the row's step -> its result [1, .]
RunRow = Callable[[Sequence[torch.Tensor], torch.Tensor, StateStep], torch.Tensor]


def run_rows_(
    run: RunRow,
    of_rows: Sequence[torch.Tensor],
    states: torch.Tensor,
    step: StateStep,
    result: torch.Tensor,
) -> torch.Tensor:
    """Fill `result` [T, ...] row by row; `states` [P, ...] are changed in place."""
    for rows, slot, is_first in requests_of(step):
        own = states.new_zeros(1, *states.shape[1:])
        if not is_first:
            own.copy_(states[slot : slot + 1])
        for t in range(rows.start, rows.stop):
            row = _step_of_row(begins=is_first and t == rows.start)
            result[t] = run([x[t : t + 1].clone() for x in of_rows], own, row)[0]
        if slot >= 0:
            states[slot] = own[0]
    return result


def _step_of_row(*, begins: bool) -> StateStep:
    return StateStep(
        query_starts_R1=torch.tensor([0, 1], dtype=torch.int32),
        context_lengths_R=torch.tensor([1 if begins else 2], dtype=torch.int32),
        slots_R=torch.tensor([0], dtype=torch.int32),
        max_query_len=1,
    )
