"""Token embedding: the first thing that a decoder does. Legend: V tokens, C hidden size."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from formats.shares import Share
from qserve.parallel.communicator import Communicator
from qserve.parallel.gather import gathered_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyPart:
    """The tokens whose rows of embedding and head this rank has."""

    communicator: Communicator
    shares: tuple[Share, ...]  # of each rank

    @property
    def start(self) -> int:
        return self.shares[self.communicator.rank][0]

    @property
    def stop(self) -> int:
        return self.shares[self.communicator.rank][1]

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.shares)


class Embedding(torch.nn.Module):
    """Rows of a table [V, C], times a factor. Ranks may have parts of the table."""

    def __init__(
        self, weight_VC: torch.Tensor, factor: float = 1.0, part: VocabularyPart | None = None
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight_VC)
        # rounded to the table's dtype, as transformers rounds Gemma's
        self.factor = torch.tensor(factor, dtype=weight_VC.dtype).item()
        self.part = part

    def whole_table(self) -> torch.Tensor:
        """The table of all tokens, from all ranks. Each of them must ask."""
        if self.part is None:
            return self.weight
        whole_CV = gathered_columns(self.part.communicator, self.weight.T, self.part.widths)
        return whole_CV.T.contiguous()

    def forward(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        if self.part is None:
            x_TC = functional.embedding(token_ids_T, self.weight)
        else:
            x_TC = self._gathered(token_ids_T, self.part)
        return x_TC if self.factor == 1 else x_TC * self.factor

    def _gathered(self, token_ids_T: torch.Tensor, part: VocabularyPart) -> torch.Tensor:
        """One rank has a token's row, the others add zeros."""
        is_ours_T = (token_ids_T >= part.start) & (token_ids_T < part.stop)
        rows_T = torch.where(is_ours_T, token_ids_T - part.start, 0)
        x_TC = functional.embedding(rows_T, self.weight)
        return part.communicator.all_reduce(x_TC.masked_fill(~is_ours_T[:, None], 0))
