"""State slots of recurrent layers, which keep a state instead of keys, and the slots of a step.

Some rows of a speculative verification may be rejected, so the recurrent state of a slot ("memory")
does not include them at first. The slot keeps the inputs of its newest rows, and the next step
first applies the accepted ones (the "lacking" rows). Rows are found by their positions.

    P  slots                         H  heads
    R  requests of a step            K  rows of a head's state
    C  channels of the convolution   V  columns of a head's state
    L  kept convolution inputs       N  newest rows that are kept
    I  inputs of a row
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

NO_SLOT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSlots:
    """State slots of one layer.

    Contents of a slot from before its owner's first token are never read.
    """

    # [P, C, L]: the convolution's input at position p is in column p % L; None: no convolution
    conv_PCL: torch.Tensor | None
    memory_PHKV: torch.Tensor | None = None  # float32 recurrent state; None: convolution only
    # inputs of the row at position p are in row p % N; None: no row is ever rejected
    recent_PNI: torch.Tensor | None = None

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
        most_rows: int = 0,
        inputs: int = 0,
    ) -> "StateSlots":
        """Allocate zeroed slots. `dtype` is the dtype of activations.

        `channels` 0: no convolution. `memory` is (H, K, V) of the recurrent state. `most_rows` are
        the rows of the longest verification; 0: no row is ever rejected. `inputs` is I.
        """
        conv_PCL, columns = None, taps - 1 + most_rows
        if channels:
            conv_PCL = torch.zeros(num_slots, channels, columns, dtype=dtype, device=device)
        if memory is None:
            return cls(conv_PCL=conv_PCL)
        recent_PNI = None
        if most_rows:
            # twice as many rows: a step reads the newest rows while it writes its own
            shape = num_slots, 2 * most_rows, inputs
            recent_PNI = torch.zeros(shape, dtype=dtype, device=device)
        memory_PHKV = torch.zeros(num_slots, *memory, dtype=torch.float32, device=device)
        return cls(conv_PCL=conv_PCL, memory_PHKV=memory_PHKV, recent_PNI=recent_PNI)

    @property
    def page_tensors(self) -> tuple[torch.Tensor, ...]:
        """Empty: states are kept by slot, not by page."""
        return ()

    @property
    def slot_tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors [P, ...] that hold the contents of the slots."""
        tensors = self.conv_PCL, self.memory_PHKV, self.recent_PNI
        return tuple(tensor for tensor in tensors if tensor is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateStep:
    """The rows of one step and the slot of each request.

    A request whose rows begin at position 0 starts from a zero state, whatever its slot holds. So
    does a request with NO_SLOT, whose state is not kept.

    With `lacking_R`, a step of 2 to N / 2 rows counts as a verification: it leaves the recurrent
    state as it was before the step's rows, and keeps their inputs. Other steps include their rows.
    """

    query_starts_R1: torch.Tensor  # int32 [R + 1]: request r has rows starts[r] .. starts[r + 1]
    context_lengths_R: torch.Tensor  # int32: tokens up to and including the request's last row
    slots_R: torch.Tensor  # int32
    max_query_len: int  # upper bound of the rows of a request, known on the host
    # int32: rows before the step that the state lacks (ops.lacking_rows_); None: it lacks none
    lacking_R: torch.Tensor | None = None


class StateRows(NamedTuple):
    """The rows of one request in a step."""

    rows: slice
    slot: int
    start: int  # position of the first row
    lacking: int  # rows before `start` that the slot's recurrent state does not include

    @property
    def count(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def is_first(self) -> bool:
        """True if the request starts from a zero state."""
        return self.slot < 0 or self.start <= 0

    def is_verify(self, recent_PNI: torch.Tensor | None) -> bool:
        """Return True if the recurrent state stays as it was before these rows."""
        return recent_PNI is not None and 1 < self.count <= recent_PNI.shape[1] // 2


def requests_of(step: StateStep) -> Iterator[StateRows]:
    """Yield the rows of each request that has any."""
    starts, lengths = step.query_starts_R1.tolist(), step.context_lengths_R.tolist()
    slots = step.slots_R.tolist()
    lacking = [0] * len(slots) if step.lacking_R is None else step.lacking_R.tolist()
    for r, slot in enumerate(slots):
        count = starts[r + 1] - starts[r]
        if count:
            rows = slice(starts[r], starts[r + 1])
            yield StateRows(rows, slot, lengths[r] - count, lacking[r])


def recent_rows(recent_NI: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """Return the inputs [n, I] of the `count` rows before position `start`."""
    return recent_NI[_recent_index(recent_NI, start - count, count)]


def keep_recent_(recent_NI: torch.Tensor, start: int, *inputs: torch.Tensor) -> None:
    """Store the inputs of the rows from position `start` on, concatenated."""
    index_n = _recent_index(recent_NI, start, len(inputs[0]))
    recent_NI[index_n] = torch.cat(inputs, 1).to(recent_NI.dtype)


def _recent_index(recent_NI: torch.Tensor, start: int, count: int) -> torch.Tensor:
    positions = torch.arange(start, start + count, device=recent_NI.device)
    return positions % len(recent_NI)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitStep:
    """A step split in two: requests with one row and no lacking rows run together; others do not.

    Legend: B requests of the first kind.
    """

    rows_B: torch.Tensor
    slots_B: torch.Tensor
    first_B: torch.Tensor  # True: the request starts from a zero state
    positions_B: torch.Tensor
    others: list[StateRows]

    @classmethod
    def of(cls, step: StateStep, device: torch.device) -> "SplitStep":
        found = list(requests_of(step))
        single = [each for each in found if each.count == 1 and not each.lacking]
        numbers = [[each.rows.start, each.slot, each.is_first, each.start] for each in single]
        columns = torch.tensor(numbers, dtype=torch.int64).view(-1, 4).T.to(device)
        rows_B, slots_B, first_B, positions_B = columns
        return cls(
            rows_B=rows_B,
            slots_B=slots_B,
            first_B=first_B.bool(),
            positions_B=positions_B,
            others=[each for each in found if each.count > 1 or each.lacking],
        )

    def gathered(self, states: torch.Tensor) -> torch.Tensor:
        """Copy the states of the single-row requests; zeros for requests that start."""
        found = states[self.slots_B.clamp(min=0)]
        found[self.first_B] = 0
        return found

    def scatter_(self, states: torch.Tensor, new: torch.Tensor) -> None:
        """Store the new states of the single-row requests."""
        kept_B = self.slots_B >= 0
        states[self.slots_B[kept_B]] = new[kept_B]
