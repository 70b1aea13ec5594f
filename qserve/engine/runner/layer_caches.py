"""LayerCaches: KV pages and states of all layers of a rank, and their copies in host memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from qkernels import ops
from qserve.engine.runner.page_copies import PageCopies, copy_pages, copy_states
from qserve.engine.runner.speculator import Speculator
from qserve.engine.step.device_step import Batch
from qserve.engine.step.step_input import StepInput
from qserve.model.blocks.states.state import state_step
from qserve.model.cache_spec import Cache, CacheSpec, KvFormat, make_caches


@dataclass(frozen=True, slots=True, kw_only=True)
class CoveredTokens:
    """Number of tokens that the state in each slot includes, for speculation.

    A verification does not apply its rows to the states, since some rows may be rejected. The next
    step compares these numbers with its first positions to find the accepted rows that it must
    apply first. CoveredTokens is a Cache, so the numbers are copied together with the states.
    """

    covered_P: torch.Tensor  # int32, one count per slot
    most_rows: int  # maximum number of rows of a verification
    page_tensors: tuple[torch.Tensor, ...] = ()

    @classmethod
    def zeros(cls, num_slots: int, most_rows: int, device: torch.device) -> "CoveredTokens":
        covered_P = torch.zeros(num_slots, dtype=torch.int32, device=device)
        return cls(covered_P=covered_P, most_rows=most_rows)

    @property
    def slot_tensors(self) -> tuple[torch.Tensor, ...]:
        """The token counts."""
        return (self.covered_P,)

    def advance_(self, batch: Batch) -> Batch:
        """Return the step with `lacking_R`, the number of rows that its states lack.

        Updates the counts to those after the step.
        """
        lacking_R = ops.lacking_rows_(self.covered_P, state_step(batch), self.most_rows)
        return replace(batch, lacking_R=lacking_R)


class LayerCaches:
    """Caches of the decoder's layers and of the drafter's, which use the same page numbers."""

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        kv_format: KvFormat,
        device: torch.device,
        *,
        speculator: Speculator | None,
        most_rows: int,
    ) -> None:
        """`most_rows`: maximum rows of a verification; 0: no states or no drafts."""
        self.layers: list[Cache] = []  # of the decoder
        self.covered: CoveredTokens | None = None  # for states with speculation
        self.page_copies: PageCopies | None = None  # None: no host tier
        self.state_copies: PageCopies | None = None
        self._specs, self._kv_format, self._device = specs, kv_format, device
        self._speculator, self._most_rows = speculator, most_rows

    def allocate(self, num_pages: int, num_slots: int) -> None:
        """Allocate the KV pages and, if the model has them, the states."""
        self.layers = make_caches(self._specs, num_pages, num_slots, self._device)
        if self._most_rows:
            self.covered = CoveredTokens.zeros(num_slots, self._most_rows, self._device)
        if self._speculator is not None:
            self._speculator.allocate_pages(num_pages, self._kv_format)

    def free(self) -> None:
        self.layers, self.covered = [], None
        self._drafter.clear()

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors of all pages and states, including the drafter's."""
        caches = [*self.with_states, *self._drafter]
        return [each for cache in caches for each in (*cache.page_tensors, *cache.slot_tensors)]

    def offload(self, num_slots: int, num_states: int = 0) -> None:
        """Allocate host memory for `num_slots` KV pages and `num_states` state snapshots.

        The device's pages must already be allocated.
        """
        self.page_copies = PageCopies(self.with_pages, num_slots, self._device)
        if num_states:
            caches = self.with_states
            self.state_copies = PageCopies(caches, num_states, self._device, of_states=True)

    def advance_(self, batch: Batch) -> Batch:
        """Count the rows of a forward pass as included in the states, if they are counted."""
        return batch if self.covered is None else self.covered.advance_(batch)

    def move(self, step: StepInput) -> None:
        """Start the copies of pages and states that a step needs first."""
        if step.state_moves is not None:
            copy_states(self.with_states, step.state_moves, self._device, self.state_copies)
        moves = step.page_moves
        if moves is None:
            return
        if self.page_copies is not None:
            self.page_copies.store(moves)
        copy_pages(self.layers, moves, self._device)
        if self.page_copies is not None:
            self.page_copies.load(moves)

    @property
    def _drafter(self) -> list[Cache]:
        return [] if self._speculator is None else self._speculator.caches

    @property
    def num_of_drafter(self) -> int:
        """Number of the drafter's layers."""
        return len(self._drafter)

    @property
    def with_pages(self) -> list[Cache]:
        """The decoder's caches, and then the drafter's."""
        return [*self.layers, *self._drafter]

    @property
    def with_states(self) -> list[Cache]:
        """The decoder's caches, and the counts of tokens that their states include."""
        return self.layers if self.covered is None else [*self.layers, self.covered]
