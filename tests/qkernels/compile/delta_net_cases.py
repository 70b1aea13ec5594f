"""Calls of the gated delta net's operations, for cases.py: sizes of Qwen3.5 and Qwen3-Next."""

import torch

from qkernels import ops
from qkernels.causal_conv.state import StateSlots, StateStep
from qkernels.delta_net.reference import recent_width
from tests.qkernels.compile.cards import empty

J, H, TAPS = 16, 32, 4


def delta_net(
    R: int,
    count: int,
    dtype: torch.dtype = torch.bfloat16,
    K: int = 128,
    most_rows: int = 0,
    kernel: str | None = None,
) -> None:
    """A layer of R requests with `count` tokens each, between its projections.

    `most_rows`: rows of a verification; 0: without speculation.
    """
    V = K
    T, channels = R * count, 2 * J * K + H * V
    step = StateStep(
        query_starts_R1=torch.zeros(R + 1, dtype=torch.int32),
        context_lengths_R=torch.zeros(R, dtype=torch.int32),
        slots_R=torch.zeros(R, dtype=torch.int32),
        max_query_len=count,
        lacking_R=torch.zeros(R, dtype=torch.int32) if most_rows else None,
    )
    states = StateSlots.zeros(
        2,
        channels=channels,
        taps=TAPS,
        memory=(H, K, V),
        dtype=dtype,
        device="cpu",
        most_rows=most_rows,
        inputs=recent_width(J * K, H * V, H),
    )
    if most_rows:
        ops.lacking_rows_(torch.zeros(2, dtype=torch.int32), step, most_rows)
    made, gates = empty(T, channels + H * V, dtype=dtype), empty(T, 2 * H, dtype=dtype)
    weight = empty(channels, TAPS, dtype=dtype)
    mixed = ops.causal_conv_(made[:, :channels], weight, None, states.conv_PCL, step, kernel)
    b, a = gates.chunk(2, 1)
    of_heads = torch.zeros(2, H)
    kept = states.memory_PHKV, step, states.recent_PNI
    out = ops.delta_rule_(mixed, b, a, *of_heads, *kept, kernel)
    z = made[:, channels:].unflatten(1, (H, V))
    ops.gated_rms_norm(out, z, empty(V, dtype=dtype), 1e-6, kernel)
