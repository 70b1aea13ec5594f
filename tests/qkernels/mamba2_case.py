"""A step of Mamba-2 with random numbers, for its tests. Legend as in mamba2/ops.py."""

from dataclasses import dataclass, replace

import torch

from qkernels.causal_conv.state import StateStep
from tests.qkernels.delta_net_case import make_step

FLOAT32 = {"a_log_H", "skip_H", "dt_bias_H", "memory_PHND"}
LIMITS = (0.1, 3.0)  # both are reached


@dataclass(frozen=True, kw_only=True)
class ScanCase:
    """Rows, parameters and states of requests with so many rows each after so many tokens."""

    mixed_TC: torch.Tensor
    dt_TH: torch.Tensor
    a_log_H: torch.Tensor
    skip_H: torch.Tensor
    dt_bias_H: torch.Tensor
    memory_PHND: torch.Tensor
    counts: tuple[int, ...]
    before: tuple[int, ...]
    slots: tuple[int, ...]
    limits: tuple[float, float] = LIMITS

    @classmethod
    def make(cls, counts, before, *, G=2, H=6, N=12, D=20, slots=None, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def noise(*shape):
            return torch.randn(*shape, generator=generator)

        T, P = sum(counts), len(counts) + 3
        return cls(
            mixed_TC=noise(T, H * D + 2 * G * N),
            dt_TH=2 * noise(T, H),
            # Some heads forget immediately, some hardly.
            a_log_H=torch.linspace(-4.6, 2.7, H),
            skip_H=noise(H),
            dt_bias_H=noise(H),
            memory_PHND=noise(P, H, N, D),
            counts=tuple(counts),
            before=tuple(before),
            slots=slots or tuple(torch.randperm(P, generator=generator)[: len(counts)].tolist()),
        )

    def to(self, dtype, device="cpu"):
        """Case in another dtype: the states in float32, or wider where all are."""
        state = dtype if dtype == torch.float64 else torch.float32
        tensors = {
            name: value.to(device, state if name in FLOAT32 else dtype)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor)
        }
        return replace(self, **tensors)

    @property
    def step(self) -> StateStep:
        return make_step(self.counts, self.before, self.slots, self.mixed_TC.device)

    @property
    def owned(self):
        """Slots that the step writes."""
        return [s for s, count in zip(self.slots, self.counts, strict=True) if count and s >= 0]

    @property
    def unread(self):
        """States with NaN in every slot that no request of the step continues from."""
        states = self.memory_PHND.clone()
        going = [s for s, n in zip(self.slots, self.before, strict=True) if n and s >= 0]
        states[[slot for slot in range(len(states)) if slot not in going]] = torch.nan
        return states

    def rows(self, start, count):
        """Some rows of the one request that there is."""
        own = slice(start, start + count)
        before = (self.before[0] + start,)
        cut = {"mixed_TC": self.mixed_TC[own], "dt_TH": self.dt_TH[own]}
        return replace(self, **cut, counts=(count,), before=before)

    def run(self, function, states, **options):
        heads = self.a_log_H, self.skip_H, self.dt_bias_H
        return function(
            self.mixed_TC, self.dt_TH, *heads, states, self.limits, self.step, **options
        )
