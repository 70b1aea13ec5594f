"""Verifications of one request whose rows are partly rejected, for tests of states.

The rows of a step after the accepted ones are noise, and come again later as they should be. The
results of accepted rows must be those of the whole text in one step, in float64.
"""

from collections.abc import Callable

import torch

from qkernels.causal_conv.reference import lacking_rows_
from qkernels.causal_conv.state import StateStep
from tests.qkernels.delta_net_case import assert_close, make_step

MAX_ROWS = 3  # of a verification
# Rows of a step, and how many of them are accepted; a prompt's all are. A small chunk of a prompt
# is computed as a verification is, and a long chunk comes right after rows that the state lacks.
STEPS = ((20, 20), (3, 1), (3, 3), (1, 1), (3, 2), (2, 2), (17, 17), (2, 1), (3, 2), (1, 1), (3, 3))
NUM_ROWS = sum(accepted for _, accepted in STEPS)

# (rows of the text, number of rejected rows, the step) -> results of all rows
Run = Callable[[slice, int, StateStep], torch.Tensor]


def check_steps(run: Run, want: torch.Tensor, slot: int, limit: float, most_rows=MAX_ROWS) -> None:
    """Compare each step's accepted rows. Another request without a slot has no rows."""
    covered_P = torch.full((slot + 2,), -1000, dtype=torch.int32)
    start = 0
    for count, accepted in STEPS:
        step = make_step((0, count), (0, start), [-1, slot], "cpu")
        lacking_R = lacking_rows_(covered_P, step, most_rows)
        step = StateStep(
            query_starts_R1=step.query_starts_R1.to(want.device),
            context_lengths_R=step.context_lengths_R.to(want.device),
            slots_R=step.slots_R.to(want.device),
            lacking_R=lacking_R.to(want.device),
            max_query_len=count,
        )
        rows = slice(start, start + accepted)
        got = run(rows, count - accepted, step)[:accepted]
        assert_close(f"rows {rows} of a step of {count}", want[rows], got, limit)
        start += accepted
    assert start == NUM_ROWS


def with_noise(x: torch.Tensor, rows: slice, num_rejected: int) -> torch.Tensor:
    """Some rows, and noise after them."""
    generator = torch.Generator().manual_seed(rows.start)
    noise = torch.randn(num_rejected, *x.shape[1:], generator=generator)
    return torch.cat([x[rows], noise.to(x)])
