"""Pages of keys, values and of an indexer's keys, and the blocks that the indexer selects.

Legend: P pages, B tokens of a page, D numbers of an indexer's key, J KV heads, T rows of a step, X
pages of a row's selected blocks.
"""

from dataclasses import dataclass

import torch

from qkernels.attention.cache import PagedKv


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedKv:
    """Keys and values of tokens, and the keys by which an indexer scores them.

    A slot is page * B + offset in both.
    """

    kv: PagedKv
    keys_PBD: torch.Tensor  # in the activations' dtype

    @property
    def page_tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors [P, ...] of the contents of pages, as bytes."""
        return (*self.kv.page_tensors, self.keys_PBD.view(torch.uint8))

    @property
    def slot_tensors(self) -> tuple[torch.Tensor, ...]:
        """Empty: keys and values have no state slots."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedBlocks:
    """Pages of the blocks that each row sees, by position; each KV head has its own."""

    tables_JTX: torch.Tensor  # int32; pages beyond a row's count are 0
    # int32: keys in these pages that a row sees; 0 for rows that belong to no request
    counts_JT: torch.Tensor
