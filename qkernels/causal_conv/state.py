"""State slots of layers that keep states instead of keys, and the slot of each request of a step.

Legend: P slots, R requests of a step, C channels of the convolution, W taps, H heads, K rows and V
columns of a head's state.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

NO_SLOT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSlots:
    """States of one layer. A slot's contents before its owner's first token are never read."""

    conv_PCW: torch.Tensor  # [P, C, W - 1]: the last inputs of the convolution, the newest last
    memory_PHKV: torch.Tensor | None = None  # float32 [P, H, K, V]; None: the convolution is all

    @classmethod
    def zeros(
        cls,
        num_slots: int,
        *,
        channels: int,
        taps: int,
        memory: tuple[int, int, int] | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "StateSlots":
        """`memory`: H, K, V. `dtype`: of activations."""
        conv_PCW = torch.zeros(num_slots, channels, taps - 1, dtype=dtype, device=device)
        if memory is None:
            return cls(conv_PCW=conv_PCW)
        states = torch.zeros(num_slots, *memory, dtype=torch.float32, device=device)
        return cls(conv_PCW=conv_PCW, memory_PHKV=states)

    @property
    def page_tensors(self) -> tuple[torch.Tensor, ...]:
        """Empty: a state is kept by slot, not by page."""
        return ()

    @property
    def slot_tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors [P, ...] of what each slot holds."""
        if self.memory_PHKV is None:
            return (self.conv_PCW,)
        return self.conv_PCW, self.memory_PHKV


@dataclass(frozen=True, slots=True, kw_only=True)
class StateStep:
    """The rows of one step, and the slot of each request.

    A request whose rows begin at position 0 starts from a state of zeros, whatever its slot holds.
    One with NO_SLOT does, too, and its state is kept nowhere.
    """

    query_starts_R1: torch.Tensor  # int32 [R + 1]: request r has rows starts[r] .. starts[r + 1]
    context_lengths_R: torch.Tensor  # int32: tokens up to the request's last row, that included
    slots_R: torch.Tensor  # int32
    max_query_len: int  # an upper bound that the host knows


def requests_of(step: StateStep) -> Iterator[tuple[slice, int, bool]]:
    """Yield each request with rows: its rows, its slot, whether its state begins as zeros."""
    starts, lengths = step.query_starts_R1.tolist(), step.context_lengths_R.tolist()
    for r, slot in enumerate(step.slots_R.tolist()):
        count = starts[r + 1] - starts[r]
        if count:
            yield slice(starts[r], starts[r + 1]), slot, slot < 0 or lengths[r] <= count


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitStep:
    """Requests of one row, which run together, and the others, for plain torch.

    Legend: B requests of one row.
    """

    rows_B: torch.Tensor
    slots_B: torch.Tensor
    first_B: torch.Tensor  # their states begin as zeros
    others: list[tuple[slice, int, bool]]  # as `requests_of` yields them

    @classmethod
    def of(cls, step: StateStep, device: torch.device) -> "SplitStep":
        found = list(requests_of(step))
        single = [each for each in found if each[0].stop - each[0].start == 1]
        numbers = [[rows.start, slot, is_first] for rows, slot, is_first in single]
        rows_B, slots_B, first_B = torch.tensor(numbers, dtype=torch.int64).view(-1, 3).T
        return cls(
            rows_B=rows_B.to(device),
            slots_B=slots_B.to(device),
            first_B=first_B.bool().to(device),
            others=[each for each in found if each[0].stop - each[0].start > 1],
        )

    def gathered(self, states: torch.Tensor) -> torch.Tensor:
        """Copy the states of the requests of one row, zeros for those that begin."""
        found = states[self.slots_B.clamp(min=0)]
        found[self.first_B] = 0
        return found

    def scatter_(self, states: torch.Tensor, new: torch.Tensor) -> None:
        """Store the states of the requests of one row."""
        kept_B = self.slots_B >= 0
        states[self.slots_B[kept_B]] = new[kept_B]
