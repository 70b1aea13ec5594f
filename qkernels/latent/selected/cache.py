"""Pages of latents and of an indexer's keys, and the keys that the indexer selects.

Legend: P pages, B tokens of a page, D numbers of an indexer's key, T rows of a step, S most keys
that a row sees.
"""

from dataclasses import dataclass

import torch

from qkernels.latent.cache import PagedLatents


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedLatents:
    """Entries of tokens, and the keys by which an indexer scores them.

    A slot is page * B + offset in both.
    """

    latents: PagedLatents
    keys_PBD: torch.Tensor  # in the activations' dtype

    @property
    def page_tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors [P, ...] of the contents of pages, as bytes."""
        return (*self.latents.page_tensors, self.keys_PBD.view(torch.uint8))

    @property
    def slot_tensors(self) -> tuple[torch.Tensor, ...]:
        """Empty: latents have no state slots."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedKeys:
    """Slots of the keys that each row sees, by position."""

    slots_TS: torch.Tensor  # int32; slots beyond a row's count are 0
    # int32, 1 to S; rows that belong to no request see the key in slot 0
    counts_T: torch.Tensor
