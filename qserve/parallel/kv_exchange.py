"""KvExchange: exchanges keys and values of prompt tokens between ranks (context parallelism).

n: ranks. T: tokens that each rank computes and sends. P: pages. B: tokens of a page.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from qserve.parallel.communicator import Communicator


class Pages(Protocol):
    """The cache of a layer."""

    @property
    def page_tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors [P, B, ...]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KvExchange:
    """The exchange of one step. Each layer runs it after writing the rank's own tokens.

    The ranks send bytes as stored, so all ranks get the same pages in any KV format.
    """

    communicator: Communicator
    own_slots_T: torch.Tensor  # int64: page * B + offset of this rank's tokens
    all_slots_nT: torch.Tensor  # int64 [n T]: the same for all ranks' tokens, in rank order

    def exchange_(self, cache: Pages) -> None:
        """Write the keys and values of other ranks' tokens to a cache."""
        tensors = cache.page_tensors
        page_size = tensors[0].shape[1]
        own = _places(self.own_slots_T, page_size)
        rows = [tensor[own].flatten(1) for tensor in tensors]
        widths = [each.shape[1] * each.element_size() for each in rows]
        sent_TX = torch.cat([each.contiguous().view(torch.uint8) for each in rows], 1)
        found = self.communicator.all_gather(sent_TX).flatten(0, 1).split(widths, 1)
        places = _places(self.all_slots_nT, page_size)
        for tensor, stored in zip(tensors, found, strict=True):
            values = stored.contiguous().view(tensor.dtype)
            tensor[places] = values.view(len(values), *tensor.shape[2:])


def _places(slots: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return slots // page_size, slots % page_size
