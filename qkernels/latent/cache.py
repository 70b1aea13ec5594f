"""Pages of one layer's latents. Legend: P pages, B tokens of a page, E numbers of an entry."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedLatents:
    """One entry for each token: its normed latent, then its rotated key, for all heads.

    A slot is page * B + offset.
    """

    pages: torch.Tensor  # [P, B, E], of the activations' dtype

    @property
    def page_tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors [P, ...] of what each page holds, as bytes."""
        return (self.pages.view(torch.uint8),)

    @property
    def slot_tensors(self) -> tuple[torch.Tensor, ...]:
        """Empty: latents have no state slots."""
        return ()

    @property
    def page_size(self) -> int:
        return self.pages.shape[1]
