"""Operations on recurrent states that compute each row alone, for a CPU in fixed order.

Then a row's bits depend only on the rows of its request before it: states and shapes are the same
in a whole prompt, in chunks of any length, and in decode.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from qkernels.causal_conv.state import StateStep, keep_recent_, recent_rows, requests_of

# (tensors of one row, states [1, ...] changed in place, the row's step) -> the row's result [1, .]
RunRow = Callable[[Sequence[torch.Tensor], torch.Tensor, StateStep], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentRows:
    """Inputs of the newest rows of each slot, for steps whose rows may be rejected."""

    recent_PNI: torch.Tensor | None  # None: no row is ever rejected
    # rows of a step -> their inputs, which are concatenated in `recent_PNI`
    inputs_of: Callable[[slice], Sequence[torch.Tensor]]
    # inputs [n, I] of n rows -> the separate tensors, as a step passes them
    rows_of: Callable[[torch.Tensor], Sequence[torch.Tensor]]


def run_separate_rows_(
    run: RunRow,
    of_rows: Sequence[torch.Tensor],
    states: torch.Tensor,
    step: StateStep,
    result: torch.Tensor,
    recent: RecentRows | None = None,
) -> torch.Tensor:
    """Fill `result` [T, ...] row by row; `states` [P, ...] are changed in place."""
    recent_PNI = None if recent is None else recent.recent_PNI
    for each in requests_of(step):
        own = states.new_zeros(1, *states.shape[1:])
        if not each.is_first:
            own.copy_(states[each.slot : each.slot + 1])
        if recent_PNI is not None and each.lacking:
            inputs_nI = recent_rows(recent_PNI[each.slot], each.start, each.lacking)
            old, first = recent.rows_of(inputs_nI), each.start - each.lacking
            for i in range(each.lacking):
                run([x[i : i + 1].clone() for x in old], own, _step_of_row(first + i))
        is_verify = each.is_verify(recent_PNI)
        if is_verify and each.slot >= 0:
            states[each.slot] = own[0]
            keep_recent_(recent_PNI[each.slot], each.start, *recent.inputs_of(each.rows))
        for position, t in enumerate(range(each.rows.start, each.rows.stop), each.start):
            row = _step_of_row(position)
            result[t] = run([x[t : t + 1].clone() for x in of_rows], own, row)[0]
        if each.slot >= 0 and not is_verify:
            states[each.slot] = own[0]
    return result


def _step_of_row(position: int) -> StateStep:
    return StateStep(
        query_starts_R1=torch.tensor([0, 1], dtype=torch.int32),
        context_lengths_R=torch.tensor([position + 1], dtype=torch.int32),
        slots_R=torch.tensor([0], dtype=torch.int32),
        max_query_len=1,
    )
