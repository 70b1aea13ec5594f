"""A step of Mamba-1 with random numbers, for its tests. Legend as in mamba1/ops.py."""

from dataclasses import dataclass, replace

import torch

from qkernels.causal_conv.state import StateStep
from tests.qkernels.delta_net_case import make_step

FLOAT32 = {"rates_NI", "skip_I", "memory_P1NI"}
OF_ROWS = ("x_TI", "dt_TI", "b_TN", "c_TN")


@dataclass(frozen=True, kw_only=True)
class ChannelCase:
    """Rows, parameters and states of requests with so many rows each after so many tokens."""

    x_TI: torch.Tensor
    dt_TI: torch.Tensor
    b_TN: torch.Tensor
    c_TN: torch.Tensor
    rates_NI: torch.Tensor
    skip_I: torch.Tensor
    memory_P1NI: torch.Tensor
    counts: tuple[int, ...]
    before: tuple[int, ...]
    slots: tuple[int, ...]

    @classmethod
    def make(cls, counts, before, *, channels=75, N=12, slots=None, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def noise(*shape):
            return torch.randn(*shape, generator=generator)

        T, P = sum(counts), len(counts) + 3
        return cls(
            x_TI=noise(T, channels),
            dt_TI=2 * noise(T, channels),
            b_TN=noise(T, N),
            c_TN=noise(T, N),
            # Some numbers of a state are forgotten immediately, some hardly; each has its own rate.
            rates_NI=-torch.linspace(-4.6, 2.7, N * channels)
            .exp()
            .view(channels, N)
            .T.contiguous(),
            skip_I=noise(channels),
            memory_P1NI=noise(P, 1, N, channels),
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
        return make_step(self.counts, self.before, self.slots, self.x_TI.device)

    @property
    def of_rows(self):
        return tuple(getattr(self, name) for name in OF_ROWS)

    @property
    def owned(self):
        """Slots that the step writes."""
        return [s for s, count in zip(self.slots, self.counts, strict=True) if count and s >= 0]

    @property
    def unread(self):
        """States with NaN in every slot that no request of the step continues from."""
        states = self.memory_P1NI.clone()
        going = [s for s, n in zip(self.slots, self.before, strict=True) if n and s >= 0]
        states[[slot for slot in range(len(states)) if slot not in going]] = torch.nan
        return states

    def rows(self, start, count):
        """Some rows of the one request that there is."""
        cut = {name: getattr(self, name)[start : start + count] for name in OF_ROWS}
        return replace(self, **cut, counts=(count,), before=(self.before[0] + start,))

    def run(self, function, states, **options):
        return function(*self.of_rows, self.rates_NI, self.skip_I, states, self.step, **options)
