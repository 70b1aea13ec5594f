"""A step of the causal convolutions with random numbers. Legend as in causal_conv/ops.py."""

from dataclasses import dataclass, replace

import torch

from qkernels.causal_conv.state import StateStep
from tests.qkernels.delta_net_case import make_step

PARTS = {"causal_conv_": 1, "short_conv_": 3}  # operation -> tensors side by side in its rows


@dataclass(frozen=True, kw_only=True)
class ConvCase:
    """Rows, weights and states of requests with so many rows each after so many tokens."""

    x: torch.Tensor
    weight_CW: torch.Tensor
    bias_C: torch.Tensor | None
    conv_PCL: torch.Tensor
    counts: tuple[int, ...]
    before: tuple[int, ...]
    slots: tuple[int, ...]

    @classmethod
    def make(cls, op, counts, before, *, C=44, taps=4, bias=False, slots=None):
        generator = torch.Generator().manual_seed(0)

        def noise(*shape):
            return torch.randn(*shape, generator=generator)

        P = len(counts) + 3
        return cls(
            x=noise(sum(counts), PARTS[op] * C),
            weight_CW=noise(C, taps),
            bias_C=noise(C) if bias else None,
            conv_PCL=noise(P, C, taps - 1),
            counts=counts,
            before=before,
            slots=slots or tuple(torch.randperm(P, generator=generator)[: len(counts)].tolist()),
        )

    def to(self, dtype, device="cpu"):
        tensors = {n: v for n, v in vars(self).items() if isinstance(v, torch.Tensor)}
        return replace(self, **{name: value.to(device, dtype) for name, value in tensors.items()})

    @property
    def step(self) -> StateStep:
        return make_step(self.counts, self.before, self.slots, self.x.device)

    def rows(self, start, count):
        """Some rows of the one request that there is."""
        before = (self.before[0] + start,)
        return replace(self, x=self.x[start : start + count], counts=(count,), before=before)

    @property
    def unread(self):
        """States with NaN in every slot that no request of the step continues from."""
        states = self.conv_PCL.clone()
        going = [s for s, n in zip(self.slots, self.before, strict=True) if n and s >= 0]
        states[[slot for slot in range(len(states)) if slot not in going]] = torch.nan
        return states

    def run(self, function, states, **options):
        return function(self.x, self.weight_CW, self.bias_C, states, self.step, **options)
