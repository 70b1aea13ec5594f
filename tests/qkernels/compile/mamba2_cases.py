"""Calls of Mamba-2's operations and of the short convolution, for cases.py: sizes of Granite 4,
Falcon-H1 and LFM2."""

import torch

from qkernels import ops
from qkernels.causal_conv.state import StateSlots, StateStep
from tests.qkernels.compile.cards import empty

HEADS, DIM = 48, 64


def make_step(R: int, count: int) -> StateStep:
    return StateStep(
        query_starts_R1=torch.zeros(R + 1, dtype=torch.int32),
        context_lengths_R=torch.zeros(R, dtype=torch.int32),
        slots_R=torch.zeros(R, dtype=torch.int32),
        max_query_len=count,
    )


def mamba2(R: int, count: int, dtype: torch.dtype = torch.bfloat16, N: int = 128) -> None:
    """A layer of R requests with `count` tokens each, between its projections."""
    inner = HEADS * DIM
    T, channels, step = R * count, inner + 2 * N, make_step(R, count)
    states = StateSlots.zeros(
        2, channels=channels, taps=4, memory=(HEADS, N, DIM), dtype=dtype, device="cpu"
    )
    made = empty(T, inner + channels + HEADS, dtype=dtype)
    z, mixed, dt = made.split([inner, channels, HEADS], 1)
    weight, bias = empty(channels, 4, dtype=dtype), empty(channels, dtype=dtype)
    mixed = ops.causal_conv_(mixed, weight, bias, states.conv_PCL, step)
    of_heads, limits = torch.zeros(3, HEADS), (0.0, float("inf"))
    out = ops.selective_scan_(mixed, dt, *of_heads, states.memory_PHKV, limits, step)
    ops.gated_group_norm(out.flatten(1), z, empty(inner, dtype=dtype), 1, 1e-6, False)


def short_conv(R: int, count: int, C: int = 2048, dtype: torch.dtype = torch.bfloat16) -> None:
    states = StateSlots.zeros(2, channels=C, taps=3, memory=None, dtype=dtype, device="cpu")
    mixed, weight = empty(R * count, 3 * C, dtype=dtype), empty(C, 3, dtype=dtype)
    ops.short_conv_(mixed, weight, None, states.conv_PCL, make_step(R, count))
