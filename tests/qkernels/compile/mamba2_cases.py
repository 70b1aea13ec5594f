"""Calls of Mamba-2's operations and of the short convolution, for cases.py: sizes of Granite 4,
Falcon-H1 and LFM2."""

import torch

from qkernels import ops
from qkernels.causal_conv.state import StateSlots, StateStep
from qkernels.mamba2.reference import recent_width
from tests.qkernels.compile.cards import empty

HEADS, DIM = 48, 64


def make_step(R: int, count: int, most_rows: int = 0) -> StateStep:
    return StateStep(
        query_starts_R1=torch.zeros(R + 1, dtype=torch.int32),
        context_lengths_R=torch.zeros(R, dtype=torch.int32),
        slots_R=torch.zeros(R, dtype=torch.int32),
        max_query_len=count,
        lacking_R=torch.zeros(R, dtype=torch.int32) if most_rows else None,
    )


def mamba2(
    R: int,
    count: int,
    dtype: torch.dtype = torch.bfloat16,
    N: int = 128,
    most_rows: int = 0,
    kernel: str | None = None,
) -> None:
    """A layer of R requests with `count` tokens each, between its projections.

    `most_rows`: rows of a verification; 0: without speculation.
    """
    inner = HEADS * DIM
    T, channels, step = R * count, inner + 2 * N, make_step(R, count, most_rows)
    states = StateSlots.zeros(
        2,
        channels=channels,
        taps=4,
        memory=(HEADS, N, DIM),
        dtype=dtype,
        device="cpu",
        most_rows=most_rows,
        inputs=recent_width(inner, N, HEADS),
    )
    made = empty(T, inner + channels + HEADS, dtype=dtype)
    z, mixed, dt = made.split([inner, channels, HEADS], 1)
    weight, bias = empty(channels, 4, dtype=dtype), empty(channels, dtype=dtype)
    mixed = ops.causal_conv_(mixed, weight, bias, states.conv_PCL, step, kernel)
    of_heads, limits = torch.zeros(3, HEADS), (0.0, float("inf"))
    memory, recent = states.memory_PHKV, states.recent_PNI
    out = ops.selective_scan_(mixed, dt, *of_heads, memory, limits, step, recent, kernel)
    ops.gated_group_norm(out.flatten(1), z, empty(inner, dtype=dtype), 1, 1e-6, False, kernel)


def short_conv(R: int, count: int, C: int = 2048, dtype: torch.dtype = torch.bfloat16) -> None:
    states = StateSlots.zeros(2, channels=C, taps=3, memory=None, dtype=dtype, device="cpu")
    mixed, weight = empty(R * count, 3 * C, dtype=dtype), empty(C, 3, dtype=dtype)
    ops.short_conv_(mixed, weight, None, states.conv_PCL, make_step(R, count))
