"""Calls of operations with recurrent states: gated delta nets (sizes of Qwen3.5 and Qwen3-Next),
Mamba-1, Mamba-2 and short convolutions (sizes of FalconMamba, Granite 4, Falcon-H1 and LFM2)."""

import torch

from qkernels import ops
from qkernels.causal_conv.state import StateSlots, StateStep
from qkernels.delta_net.reference import recent_width as delta_net_width
from qkernels.mamba1.reference import recent_width as mamba1_width
from qkernels.mamba2.reference import recent_width as mamba2_width
from tests.qkernels.compile.cards import empty
from tests.qkernels.compile.cases.case import FP16, FP32, SM90, Case

J, H, TAPS = 16, 32, 4


def make_step(R: int, count: int, most_rows: int = 0) -> StateStep:
    return StateStep(
        query_starts_R1=torch.zeros(R + 1, dtype=torch.int32),
        context_lengths_R=torch.zeros(R, dtype=torch.int32),
        slots_R=torch.zeros(R, dtype=torch.int32),
        max_query_len=count,
        lacking_R=torch.zeros(R, dtype=torch.int32) if most_rows else None,
    )


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
    T, channels, step = R * count, 2 * J * K + H * V, make_step(R, count, most_rows)
    states = StateSlots.zeros(
        2,
        channels=channels,
        taps=TAPS,
        memory=(H, K, V),
        dtype=dtype,
        device="cpu",
        most_rows=most_rows,
        inputs=delta_net_width(J * K, H * V, H),
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


def kimi_delta(
    R: int, count: int, most_rows: int = 0, kernel: str | None = None, bound: float = 0.0
) -> None:
    """As delta_net, with a decay of each key channel: sizes of Kimi Linear and of Ling 3."""
    heads, width = 32, 128
    inner, T, step = heads * width, R * count, make_step(R, count, most_rows)
    states = StateSlots.zeros(
        2,
        channels=3 * inner,
        taps=TAPS,
        memory=(heads, width, width),
        dtype=torch.bfloat16,
        device="cpu",
        most_rows=most_rows,
        inputs=delta_net_width(inner, inner, heads, inner),
    )
    kept = states.memory_PHKV, step, states.recent_PNI
    gates = torch.zeros(heads), torch.zeros(inner)
    out = ops.delta_rule_(
        *(empty(T, 3 * inner), empty(T, heads), empty(T, inner), *gates, *kept, kernel),
        decay_bound=bound,
    )
    z = empty(T, heads, width)
    ops.gated_rms_norm(out, z, empty(width), 1e-6, kernel, sigmoid=True)


def olmo_delta(R: int, count: int) -> None:
    """A delta net of OLMo-Hybrid: 30 heads, keys of 96, values of 192, written up to twice."""
    heads, K, V = 30, 96, 192
    keys, values, T, step = heads * K, heads * V, R * count, make_step(R, count)
    states = StateSlots.zeros(
        2,
        channels=2 * keys + values,
        taps=TAPS,
        memory=(heads, K, V),
        dtype=torch.bfloat16,
        device="cpu",
    )
    mixed, gates = empty(T, 2 * keys + values), empty(2, T, heads)
    kept = states.memory_PHKV, step, states.recent_PNI
    out = ops.delta_rule_(mixed, *gates, *torch.zeros(2, heads), *kept, write_factor=2.0)
    ops.gated_rms_norm(out, empty(T, heads, V), empty(V), 1e-5)


def lightning(R: int, count: int, most_rows: int = 0) -> None:
    """Lightning attention of MiniMax-Text-01: a group of Mamba-2 for each head."""
    heads, width = 64, 128
    inner, T, step = heads * width, R * count, make_step(R, count, most_rows)
    states = StateSlots.zeros(
        2,
        channels=0,
        taps=1,
        memory=(heads, width, width),
        dtype=torch.bfloat16,
        device="cpu",
        most_rows=most_rows,
        inputs=mamba2_width(inner, inner, heads),
    )
    of_heads, limits = torch.zeros(3, heads), (0.0, float("inf"))
    kept = states.memory_PHKV, limits, step, states.recent_PNI
    ops.selective_scan_(empty(T, 3 * inner), empty(T, heads), *of_heads, *kept)


HEADS, DIM = 48, 64


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
        inputs=mamba2_width(inner, N, HEADS),
    )
    made = empty(T, inner + channels + HEADS, dtype=dtype)
    z, mixed, dt = made.split([inner, channels, HEADS], 1)
    weight, bias = empty(channels, 4, dtype=dtype), empty(channels, dtype=dtype)
    mixed = ops.causal_conv_(mixed, weight, bias, states.conv_PCL, step, kernel)
    of_heads, limits = torch.zeros(3, HEADS), (0.0, float("inf"))
    memory, recent = states.memory_PHKV, states.recent_PNI
    out = ops.selective_scan_(mixed, dt, *of_heads, memory, limits, step, recent, kernel)
    ops.gated_group_norm(out.flatten(1), z, empty(inner, dtype=dtype), 1, 1e-6, False, kernel)


def mamba1(
    R: int,
    count: int,
    dtype: torch.dtype = torch.bfloat16,
    most_rows: int = 0,
    kernel: str | None = None,
) -> None:
    """A layer of FalconMamba with R requests of `count` tokens each, between its projections.

    `most_rows`: rows of a verification; 0: without speculation.
    """
    inner, N, rank = 8192, 16, 256
    T, step = R * count, make_step(R, count, most_rows)
    states = StateSlots.zeros(
        2,
        channels=inner,
        taps=4,
        memory=(1, N, inner),
        dtype=dtype,
        device="cpu",
        most_rows=most_rows,
        inputs=mamba1_width(inner, N),
    )
    x, z = empty(T, 2 * inner, dtype=dtype).split([inner, inner], 1)
    weight, bias = empty(inner, 4, dtype=dtype), empty(inner, dtype=dtype)
    x = ops.causal_conv_(x, weight, bias, states.conv_PCL, step, kernel)
    _, b, c = empty(T, rank + 2 * N, dtype=dtype).split([rank, N, N], 1)
    numbers = torch.zeros(N, inner), torch.zeros(inner), states.memory_PHKV
    dt = empty(T, inner, dtype=dtype)
    out = ops.channel_scan_(x, dt, b, c, *numbers, step, states.recent_PNI, kernel)
    ops.gated_group_norm(out, z, None, 1, 1e-6, False, kernel)


def short_conv(R: int, count: int, C: int = 2048, dtype: torch.dtype = torch.bfloat16) -> None:
    states = StateSlots.zeros(2, channels=C, taps=3, memory=None, dtype=dtype, device="cpu")
    mixed, weight = empty(R * count, 3 * C, dtype=dtype), empty(C, 3, dtype=dtype)
    ops.short_conv_(mixed, weight, None, states.conv_PCL, make_step(R, count))


STATES: dict[str, Case] = {
    "delta net, 8 requests of one token": Case(run=lambda: delta_net(8, 1)),
    "delta net, verifications": Case(run=lambda: delta_net(8, 4, most_rows=4)),
    "delta net, a prompt": Case(run=lambda: delta_net(1, 200), quick=SM90, product="wgmma"),
    "delta net, heads of 256": Case(run=lambda: delta_net(1, 200, K=256), product="mma"),
    "delta net, prompts in float16": Case(run=lambda: delta_net(3, 100, FP16), product="mma"),
    "delta net, prompts in float32": Case(run=lambda: delta_net(3, 100, FP32)),
    "delta net, fixed order": Case(run=lambda: delta_net(1, 200, kernel="fixed_order")),
    "delta net, fixed order, verifications": Case(
        run=lambda: delta_net(8, 4, most_rows=4, kernel="fixed_order")
    ),
    "olmo delta, 8 requests of one token": Case(run=lambda: olmo_delta(8, 1)),
    "olmo delta, a prompt": Case(run=lambda: olmo_delta(1, 200), product="wgmma"),
    "kimi delta, 8 requests of one token": Case(run=lambda: kimi_delta(8, 1), quick=SM90),
    "kimi delta, verifications": Case(run=lambda: kimi_delta(8, 4, most_rows=4)),
    "kimi delta, bounded decays": Case(run=lambda: kimi_delta(8, 1, bound=-5.0)),
    "kimi delta, a prompt": Case(run=lambda: kimi_delta(1, 200)),
    "lightning attention, 8 requests of one token": Case(run=lambda: lightning(8, 1)),
    "lightning attention, verifications": Case(run=lambda: lightning(8, 4, most_rows=4)),
    "lightning attention, a prompt": Case(run=lambda: lightning(1, 200), product="wgmma"),
    "mamba2, fixed order": Case(run=lambda: mamba2(1, 200, kernel="fixed_order")),
    "mamba2, fixed order, verifications": Case(
        run=lambda: mamba2(8, 4, most_rows=4, kernel="fixed_order")
    ),
    "mamba2, 8 requests of one token": Case(run=lambda: mamba2(8, 1)),
    "mamba2, verifications": Case(run=lambda: mamba2(8, 4, most_rows=4)),
    "mamba2, a prompt": Case(run=lambda: mamba2(1, 200), quick=SM90, product="wgmma"),
    "mamba2, states of 256": Case(run=lambda: mamba2(1, 200, N=256)),
    "mamba2, prompts in float16": Case(run=lambda: mamba2(3, 100, FP16)),
    "mamba2, prompts in float32": Case(run=lambda: mamba2(3, 100, FP32)),
    "mamba1, 8 requests of one token": Case(run=lambda: mamba1(8, 1), quick=SM90),
    "mamba1, verifications": Case(run=lambda: mamba1(8, 4, most_rows=4)),
    "mamba1, a prompt in float32": Case(run=lambda: mamba1(1, 200, FP32)),
    "mamba1, fixed order": Case(run=lambda: mamba1(1, 200, kernel="fixed_order")),
    "short convolution": Case(run=lambda: [short_conv(8, 1), short_conv(1, 200)]),
}
