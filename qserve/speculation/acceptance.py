"""Acceptance: which drafts of a verify become output. Each rule a row of ACCEPT.

`exact`: the model draws the token of every row as it would without drafts, with the noise of (seed,
position, token); drafts come true as far as they are what was drawn. The output is the same text as
without speculation, whatever the drafter. Knows tensors, no requests.

Legend: S rows that sample, D chunks that sample, K the most drafts of one chunk.
"""

from dataclasses import dataclass

import torch

from qserve.speculation.config import SpeculativeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify:
    """The rows of a step that sample, by chunk."""

    first_D: torch.Tensor  # int64, of S: each chunk's first
    count_D: torch.Tensor  # int64: its rows, one more than its drafts
    drafts_S: torch.Tensor  # int64: the token behind each row: the draft that it judges
    most: int  # rows of one chunk

    @property
    def rows_DK1(self) -> torch.Tensor:
        """Of S, by chunk; beyond its rows the last."""
        column_K1 = torch.arange(self.most, device=self.first_D.device)
        return self.first_D[:, None] + torch.minimum(column_K1, self.count_D[:, None] - 1)

    @property
    def is_draft_DK(self) -> torch.Tensor:
        column_K = torch.arange(self.most - 1, device=self.first_D.device)
        return column_K < self.count_D[:, None] - 1


def num_agreeing(agrees_DK: torch.Tensor) -> torch.Tensor:
    """Drafts of each chunk before the first that does not agree, int64 [D]."""
    return agrees_DK.long().cumprod(1).sum(1)


def accept_exact(tokens_S: torch.Tensor, verify: Verify, config: SpeculativeConfig) -> torch.Tensor:
    """How many drafts of each chunk come true, int64 [D]: those that were drawn."""
    rows_DK = verify.rows_DK1[:, :-1]
    agrees_DK = tokens_S[rows_DK] == verify.drafts_S[rows_DK]
    return num_agreeing(agrees_DK & verify.is_draft_DK)


def accept_synthetic(
    tokens_S: torch.Tensor, verify: Verify, config: SpeculativeConfig
) -> torch.Tensor:
    """As many as config.synthetic_acceptance_rates say, by chance: to measure speed, not text.

    What is accepted becomes output: it is written to `tokens_S`.
    """
    rows_DK = verify.rows_DK1[:, :-1]
    # A draft comes true with the share of its position, given that those before it did.
    rates = config.synthetic_acceptance_rates[: rows_DK.shape[1]]
    before = (1.0, *rates)
    ratios = [rate / max(last, 1e-9) for rate, last in zip(rates, before, strict=False)]
    chance_DK = torch.rand(rows_DK.shape, device=tokens_S.device)
    passes_DK = torch.stack([chance_DK[:, k] < each for k, each in enumerate(ratios)], 1)
    accepted_D = num_agreeing(passes_DK & verify.is_draft_DK)
    column_K = torch.arange(rows_DK.shape[1], device=tokens_S.device)
    taken_DK = column_K < accepted_D[:, None]
    # rows beyond a chunk's are its last, of which no draft is taken
    new_DK = torch.where(taken_DK, verify.drafts_S[rows_DK], tokens_S[rows_DK])
    tokens_S[rows_DK] = new_DK
    return accepted_D


ACCEPT = {"exact": accept_exact, "synthetic": accept_synthetic}
