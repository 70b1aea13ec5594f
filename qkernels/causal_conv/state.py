"""State slots of layers that keep states instead of keys, and the slot of each request of a step.

Some rows of a verification may be rejected, so a slot's memory does not include them yet. The slot
has the inputs of its newest rows, and the next step first applies those of the accepted ones
("lacking" rows). Rows are found by their positions alone.

Legend: P slots, R requests of a step, C channels of the convolution, L inputs of it that are kept,
H heads, K rows and V columns of a head's state, N newest rows, I inputs of a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

NO_SLOT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSlots:
    """States of one layer. A slot's contents before its owner's first token are never read."""

    # [P, C, L]: the convolution's input at position p is in column p % L; None: there is none
    conv_PCL: torch.Tensor | None
    memory_PHKV: torch.Tensor | None = None  # float32 [P, H, K, V]; None: the convolution is all
    # the inputs of the row at position p are in row p % N; None: no row is ever rejected
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
        """`channels` 0: no convolution. `memory`: H, K, V. `dtype`: of activations. `inputs`: I.

        `most_rows`: rows of a verification; 0: no row is ever rejected.
        """
        conv_PCL, columns = None, taps - 1 + most_rows
        if channels:
            conv_PCL = torch.zeros(num_slots, channels, columns, dtype=dtype, device=device)
        if memory is None:
            return cls(conv_PCL=conv_PCL)
        recent_PNI = None
        if most_rows:
            # A step reads the newest rows while it writes its own.
            shape = num_slots, 2 * most_rows, inputs
            recent_PNI = torch.zeros(shape, dtype=dtype, device=device)
        memory_PHKV = torch.zeros(num_slots, *memory, dtype=torch.float32, device=device)
        return cls(conv_PCL=conv_PCL, memory_PHKV=memory_PHKV, recent_PNI=recent_PNI)

    @property
    def page_tensors(self) -> tuple[torch.Tensor, ...]:
        """Empty: a state is kept by slot, not by page."""
        return ()

    @property
    def slot_tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors [P, ...] of what each slot holds."""
        tensors = self.conv_PCL, self.memory_PHKV, self.recent_PNI
        return tuple(tensor for tensor in tensors if tensor is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateStep:
    """The rows of one step, and the slot of each request.

    A request whose rows begin at position 0 starts from a state of zeros, whatever its slot holds.
    One with NO_SLOT does, too, and its state is kept nowhere.

    With `lacking_R`, a step of 2 to N / 2 rows leaves the memory as it was before its own rows, and
    keeps their inputs. Other steps include their rows.
    """

    query_starts_R1: torch.Tensor  # int32 [R + 1]: request r has rows starts[r] .. starts[r + 1]
    context_lengths_R: torch.Tensor  # int32: tokens up to the request's last row, that included
    slots_R: torch.Tensor  # int32
    max_query_len: int  # an upper bound that the host knows
    # int32: rows before the step that are not in the memory (ops.lacking_rows_); None: all are
    lacking_R: torch.Tensor | None = None


class StateRows(NamedTuple):
    """Rows of one request."""

    rows: slice
    slot: int
    start: int  # position of the first row
    lacking: int  # rows before it that the slot's memory does not include

    @property
    def count(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def is_first(self) -> bool:
        """True if the state begins as zeros."""
        return self.slot < 0 or self.start <= 0

    def is_verify(self, recent_PNI: torch.Tensor | None) -> bool:
        """True if the memory stays as it was before these rows."""
        return recent_PNI is not None and 1 < self.count <= recent_PNI.shape[1] // 2


def requests_of(step: StateStep) -> Iterator[StateRows]:
    """Yield each request with rows."""
    starts, lengths = step.query_starts_R1.tolist(), step.context_lengths_R.tolist()
    slots = step.slots_R.tolist()
    lacking = [0] * len(slots) if step.lacking_R is None else step.lacking_R.tolist()
    for r, slot in enumerate(slots):
        count = starts[r + 1] - starts[r]
        if count:
            rows = slice(starts[r], starts[r + 1])
            yield StateRows(rows, slot, lengths[r] - count, lacking[r])


def recent_rows(recent_NI: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """Inputs [n, I] of the `count` rows before position `start`."""
    return recent_NI[_recent_index(recent_NI, start - count, count)]


def keep_recent_(recent_NI: torch.Tensor, start: int, *inputs: torch.Tensor) -> None:
    """Keep the inputs of rows from position `start` on, side by side."""
    index_n = _recent_index(recent_NI, start, len(inputs[0]))
    recent_NI[index_n] = torch.cat(inputs, 1).to(recent_NI.dtype)


def _recent_index(recent_NI: torch.Tensor, start: int, count: int) -> torch.Tensor:
    positions = torch.arange(start, start + count, device=recent_NI.device)
    return positions % len(recent_NI)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitStep:
    """Requests of one row without lacking rows, which run together; plain torch runs the others.

    Legend: B requests of the first kind.
    """

    rows_B: torch.Tensor
    slots_B: torch.Tensor
    first_B: torch.Tensor  # their states begin as zeros
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
        """Copy the states of the requests of one row, zeros for those that begin."""
        found = states[self.slots_B.clamp(min=0)]
        found[self.first_B] = 0
        return found

    def scatter_(self, states: torch.Tensor, new: torch.Tensor) -> None:
        """Store the states of the requests of one row."""
        kept_B = self.slots_B >= 0
        states[self.slots_B[kept_B]] = new[kept_B]
