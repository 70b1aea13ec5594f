"""Pages of compressed attention: entries of tokens, compressor inputs, compressed entries.

A compressed entry summarizes a window of m tokens, and is stored in the page of the window's last
token. Compressors also keep their projections of every token, so that a page, which may end within
a window, has all that later tokens need. A request therefore has no state besides its pages.

P: pages. B: tokens of a page. D: width of an entry. X: outputs of a compressor's projection.
G: compressed entries of a page.
"""

from dataclasses import dataclass

import torch

from formats.errors import InputError
from qserve.model.cache_spec import CacheSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSpec:
    """Sizes of one compressor's part of a page."""

    rate: int  # m, tokens of a window
    outputs: int  # X
    width: int  # D

    def entries(self, page_size: int) -> int:
        """Return G, the number of windows that may end within a page."""
        return -(-page_size // self.rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPages:
    """One compressor's part of the pages."""

    inputs_PBX: torch.Tensor  # of each token: values [X], then gates [X]
    entries_PGD: torch.Tensor

    @property
    def page_tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.inputs_PBX.view(torch.uint8), self.entries_PGD.view(torch.uint8))


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedPages:
    """The pages of one layer. Keys are also values."""

    keys_PBD: torch.Tensor
    attended: WindowPages | None = None  # None: queries see only the tokens of the sliding window
    indexed: WindowPages | None = None  # entries that the indexer scores; None: no indexer

    @property
    def page_tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors [P, ...] of the contents of pages, as bytes."""
        found = (self.keys_PBD.view(torch.uint8),)
        for each in (self.attended, self.indexed):
            found += () if each is None else each.page_tensors
        return found

    @property
    def slot_tensors(self) -> tuple[torch.Tensor, ...]:
        """Empty: there are no state slots."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedSpec(CacheSpec):
    """Cache spec of compressed attention."""

    page_size: int
    width: int  # D
    dtype: torch.dtype  # of activations
    bytes_at_once: int  # memory that attention takes besides its results
    attended: WindowSpec | None
    indexed: WindowSpec | None

    def make(self, num_pages: int, num_slots: int, device: torch.device) -> CompressedPages:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(num_pages, *shape, dtype=self.dtype, device=device)

        def windows(spec: WindowSpec | None) -> WindowPages | None:
            if spec is None:
                return None
            return WindowPages(
                inputs_PBX=zeros(self.page_size, 2 * spec.outputs),
                entries_PGD=zeros(spec.entries(self.page_size), spec.width),
            )

        return CompressedPages(
            keys_PBD=zeros(self.page_size, self.width),
            attended=windows(self.attended),
            indexed=windows(self.indexed),
        )

    @property
    def deferred_bytes(self) -> int:
        return self.bytes_at_once


def check_page_size(page_size: int, rate: int) -> None:
    """Raise InputError unless the windows that an indexer scores lie within pages."""
    if page_size % rate:
        raise InputError(
            "--block-size",
            f"expected a multiple of {rate}, the tokens of an entry that an indexer selects, found"
            f" {page_size}",
            "use --block-size 16",
        )
