"""Pages of one layer's latents. Legend: P pages, B tokens of a page, E numbers of an entry."""

from dataclasses import dataclass

import torch


def is_aligned(entry: int, latent: int) -> bool:
    """Return True if 8-bit entries, and the keys in them, begin at multiples of 16 bytes."""
    return entry % 16 == 0 and latent % 16 == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedLatents:
    """One entry per token, which all heads share: its normalized latent, then its rotated key.

    A slot is page * B + offset. In 8 bits, latent and key have separate scales, which writes
    compute.
    """

    pages: torch.Tensor  # [P, B, E]: the activations' dtype, int8 or float8_e4m3fn
    scales: torch.Tensor | None = None  # float32 [P, B, 2], with 8-bit pages

    @classmethod
    def zeros(
        cls, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
    ) -> "PagedLatents":
        """Allocate pages of `shape` [P, B, E], with scales if `dtype` has 8 bits."""
        pages = torch.zeros(shape, dtype=dtype, device=device)
        if dtype.itemsize > 1:
            return cls(pages=pages)
        return cls(pages=pages, scales=torch.zeros(*shape[:2], 2, device=device))

    @property
    def page_tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors [P, ...] of the contents of pages; entries as bytes."""
        pages = self.pages.view(torch.uint8)  # not every device has indexed copies of float8
        return (pages,) if self.scales is None else (pages, self.scales)

    @property
    def slot_tensors(self) -> tuple[torch.Tensor, ...]:
        """Empty: latents have no state slots."""
        return ()

    @property
    def page_size(self) -> int:
        return self.pages.shape[1]

    def by_slot(self) -> "PagedLatents":
        """Return a view of the entries as pages of one entry, numbered by slot."""
        scales = None if self.scales is None else self.scales.view(-1, 1, 2)
        return PagedLatents(pages=self.pages.view(-1, 1, self.pages.shape[2]), scales=scales)

    def entries(self, pages_X: torch.Tensor, latent_width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the entries [X, B, E] of pages, decoded to `dtype`."""
        if self.scales is None:
            return self.pages[pages_X].to(dtype)
        stored_XBE = self.pages.view(torch.uint8)[pages_X].view(self.pages.dtype)
        scales_XB2 = self.scales[pages_X]
        parts = stored_XBE.float().split([latent_width, self.pages.shape[2] - latent_width], -1)
        decoded = [part * scales_XB2[..., i, None] for i, part in enumerate(parts)]
        return torch.cat(decoded, dim=-1).to(dtype)
