"""A step of a gated delta net with random numbers, for its tests. Legend as in delta_net/ops.py."""

from dataclasses import dataclass, replace

import torch

from qkernels.causal_conv.state import StateStep


@dataclass(frozen=True, kw_only=True)
class _Data:
    mixed_TC: torch.Tensor
    b_TH: torch.Tensor
    a_TH: torch.Tensor
    a_log_H: torch.Tensor
    dt_bias_H: torch.Tensor
    memory_PHKV: torch.Tensor
    counts: tuple[int, ...]
    before: tuple[int, ...]
    slots: list[int]
    step: StateStep

    @property
    def rule(self):
        """The arguments of delta_rule_ before the states."""
        return self.mixed_TC, self.b_TH, self.a_TH, self.a_log_H, self.dt_bias_H

    def to(self, dtype, device="cpu"):
        """Return the case in another dtype, with states in float32 or wider."""
        state = dtype if dtype == torch.float64 else torch.float32
        wide = {"a_log_H", "dt_bias_H", "memory_PHKV"}
        tensors = {
            name: value.to(device, state if name in wide else dtype)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor)
        }
        return replace(
            self, **tensors, step=make_step(self.counts, self.before, self.slots, device)
        )

    def with_slots(self, slots):
        device = self.mixed_TC.device
        return replace(self, slots=slots, step=make_step(self.counts, self.before, slots, device))

    def rows(self, start, count):
        """Some rows of the one request that there is."""
        own = slice(start, start + count)
        cut = {name: getattr(self, name)[own] for name in ("mixed_TC", "b_TH", "a_TH")}
        counts, before = (count,), (self.before[0] + start,)
        step = make_step(counts, before, self.slots, self.mixed_TC.device)
        return replace(self, **cut, counts=counts, before=before, step=step)


def DeltaCase(  # noqa: N802
    *, counts, before, J, H, K, V, dtype=torch.float32, seed=1, by_channel=False
):
    """Requests with so many rows each after so many tokens. Slots are in no order, some unused.

    `by_channel`: a decay for each key channel of a head, not one for the head.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=generator)).to(dtype)

    T, C, P = sum(counts), 2 * J * K + H * V, len(counts) + 3
    decays = H * K if by_channel else H
    slots = torch.randperm(P, generator=generator)[: len(counts)].tolist()
    made = _Data(
        mixed_TC=noise(T, C),
        b_TH=noise(T, H, scale=2.0),
        a_TH=noise(T, decays),
        # Some heads forget immediately, some hardly: exp(a_log) is 0.01 to 16, as in new models.
        a_log_H=torch.linspace(-4.6, 2.7, H),
        dt_bias_H=noise(decays),
        memory_PHKV=noise(P, H, K, V),
        counts=tuple(counts),
        before=tuple(before),
        slots=slots,
        step=make_step(counts, before, slots, "cpu"),
    )
    return made.to(dtype)


def make_step(counts, before, slots, device):
    starts = torch.tensor([0, *counts]).cumsum(0)
    lengths = torch.tensor(before) + torch.tensor(counts)
    return StateStep(
        query_starts_R1=starts.to(device, torch.int32),
        context_lengths_R=lengths.to(device, torch.int32),
        slots_R=torch.tensor(slots, dtype=torch.int32, device=device),
        max_query_len=max(counts),
    )


def assert_close(name, want, got, ratio):
    """||got - want|| / ||want||, printed where it is too large."""
    found = float((got.double() - want.double()).norm() / want.double().norm())
    assert found <= ratio, f"{name}: {found:.3g} > {ratio:.3g}"
