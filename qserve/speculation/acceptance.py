"""Acceptance: which drafts of a verify become output.

`exact`: the model draws the token of every row as it would without drafts, with the noise of (seed,
position, token); drafts come true as far as they are what was drawn (qkernels/drafts). The output
is the same text as without speculation, whatever the drafter. Knows tensors, no requests.

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


def synthetic_shares(config: SpeculativeConfig, device: torch.device) -> torch.Tensor | None:
    """Of drafts at each position, given that those before it came true, float32; None: exact."""
    rates = config.synthetic_acceptance_rates
    if config.acceptance != "synthetic":
        return None
    before = (1.0, *rates)
    shares = [rate / max(last, 1e-9) for rate, last in zip(rates, before, strict=False)]
    return torch.tensor(shares, dtype=torch.float32, device=device)


def passes_by_chance(num_chunks: int, num_drafts: int, shares_K: torch.Tensor) -> torch.Tensor:
    """Which drafts [D, K] come true by chance: to measure speed, not text.

    What is accepted becomes output.
    """
    chance_DK = torch.rand(num_chunks, num_drafts, device=shares_K.device)
    return chance_DK < shares_K[:num_drafts]
