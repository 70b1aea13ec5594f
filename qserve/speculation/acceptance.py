"""Acceptance: which drafts of a verify become output.

With `exact`, the model samples the token of every row as it would without drafts, with the noise of
(seed, position, token). Drafts are accepted as long as they equal the sampled tokens
(qkernels/drafts). The output is the same text as without speculation, whatever the drafter.

Legend: S sampled rows, D chunks that sample, K the most drafts of one chunk.
"""

from dataclasses import dataclass

import torch

from qserve.speculation.config import SpeculativeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify:
    """Sampled rows of a step, by chunk."""

    first_D: torch.Tensor  # int64, of S: each chunk's first
    count_D: torch.Tensor  # int64: number of its rows, one more than its drafts
    drafts_S: torch.Tensor  # int64: the draft token after each row, which the row verifies
    most: int  # maximum of rows of one chunk


def synthetic_shares(config: SpeculativeConfig, device: torch.device) -> torch.Tensor | None:
    """Conditional acceptance rate at each position, float32 [K]; None unless synthetic."""
    rates = config.synthetic_acceptance_rates
    if config.acceptance != "synthetic":
        return None
    before = (1.0, *rates)
    shares = [rate / max(last, 1e-9) for rate, last in zip(rates, before, strict=False)]
    return torch.tensor(shares, dtype=torch.float32, device=device)


def passes_by_chance(num_chunks: int, num_drafts: int, shares_K: torch.Tensor) -> torch.Tensor:
    """Drafts [D, K] accepted at random: to measure speed, not text.

    Accepted drafts become output.
    """
    chance_DK = torch.rand(num_chunks, num_drafts, device=shares_K.device)
    return chance_DK < shares_K[:num_drafts]
