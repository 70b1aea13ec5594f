"""State slots of a gated delta net, and the slot of each request of a step.

Legend: P slots, R requests of a step, C channels of the convolution, W taps, H value heads, K key
dim, V value dim.
"""

from dataclasses import dataclass

import torch

NO_SLOT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSlots:
    """States of one layer. A slot's contents before its owner's first token are never read."""

    conv_PCW: torch.Tensor  # [P, C, W - 1]: the last inputs of the convolution, the newest last
    memory_PHKV: torch.Tensor  # float32 [P, H, K, V]

    @classmethod
    def zeros(
        cls,
        num_slots: int,
        *,
        channels: int,
        taps: int,
        memory: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> "StateSlots":
        """`memory`: H, K, V. `dtype`: of activations."""
        return cls(
            conv_PCW=torch.zeros(num_slots, channels, taps - 1, dtype=dtype, device=device),
            memory_PHKV=torch.zeros(num_slots, *memory, dtype=torch.float32, device=device),
        )

    @property
    def page_tensors(self) -> tuple[torch.Tensor, ...]:
        """Empty: a state is kept by slot, not by page."""
        return ()

    @property
    def slot_tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors [P, ...] of what each slot holds."""
        return self.conv_PCW, self.memory_PHKV

    @property
    def num_slots(self) -> int:
        return self.memory_PHKV.shape[0]


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
