"""Operations on states with each row computed alone, for a CPU in fixed order.

A row's bits then depend on its request's rows before it alone: the states and the shapes are the
same in a prompt, in chunks of any length, and in a decode.
"""

from collections.abc import Callable, Sequence

import torch

from qkernels.causal_conv.state import StateStep, requests_of
from qkernels.errors import KernelError

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
    for each in requests_of(step):
        own = states.new_zeros(1, *states.shape[1:])
        if not each.is_first:
            own.copy_(states[each.slot : each.slot + 1])
        for position, t in enumerate(range(each.rows.start, each.rows.stop), each.start):
            row = _step_of_row(position)
            result[t] = run([x[t : t + 1].clone() for x in of_rows], own, row)[0]
        if each.slot >= 0:
            states[each.slot] = own[0]
    return result


def check_no_verification(op: str, recent_PNI: torch.Tensor | None) -> None:
    """Raise KernelError where rows of a step may be rejected."""
    if recent_PNI is not None:
        raise KernelError(
            f"{op} recent", "rows that may be rejected are not computed in fixed order"
        )


def _step_of_row(position: int) -> StateStep:
    return StateStep(
        query_starts_R1=torch.tensor([0, 1], dtype=torch.int32),
        context_lengths_R=torch.tensor([position + 1], dtype=torch.int32),
        slots_R=torch.tensor([0], dtype=torch.int32),
        max_query_len=1,
    )
