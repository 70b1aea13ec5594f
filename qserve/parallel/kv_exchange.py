"""KvExchange: keys and values of a prompt's tokens, which ranks divide (context parallelism).

Legend: n ranks, T tokens that each computes and gives, P pages, B tokens of a page.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from qserve.parallel.communicator import Communicator


class Pages(Protocol):
    """A layer's cache."""

    @property
    def page_tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors [P, B, ...]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KvExchange:
    """One step's exchange, made in each layer after a rank has written its own tokens.

    Stored bytes are sent, so every rank has the same pages, whatever their format.
    """

    communicator: Communicator
    own_slots_T: torch.Tensor  # int64: page * B + offset
    all_slots_nT: torch.Tensor  # of all ranks' tokens, in rank order: [n T]

    def exchange_(self, cache: Pages) -> None:
        """Write the tokens of other ranks into a cache."""
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
