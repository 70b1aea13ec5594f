"""Acceptance of drafts: which draft tokens of a verification become output.

With `exact`, the model samples each row's token as it would without drafts, with noise that depends
only on (seed, position, token). Drafts are accepted up to the first one that differs from the
sampled token (qkernels/drafts). So the output is the same text as without speculation, whatever the
drafter.

Suffixes of tensor names: S sampled rows, D chunks that sample, K maximum drafts of a chunk.
"""

from dataclasses import dataclass

import torch

from qserve.speculation.config import SpeculativeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify:
    """Sampled rows of a step, by chunk."""

    first_D: torch.Tensor  # int64: index (into S) of a chunk's first row
    count_D: torch.Tensor  # int64: number of rows of a chunk, one more than its drafts
    drafts_S: torch.Tensor  # int64: the draft token that a row verifies
    most: int  # maximum number of rows of a chunk


def synthetic_rates(config: SpeculativeConfig, device: torch.device) -> torch.Tensor | None:
    """Return the conditional acceptance rate per position, float32 [K]; None unless synthetic."""
    rates = config.synthetic_acceptance_rates
    if config.acceptance != "synthetic":
        return None
    before = (1.0, *rates)
    conditional = [rate / max(last, 1e-9) for rate, last in zip(rates, before, strict=False)]
    return torch.tensor(conditional, dtype=torch.float32, device=device)


def passes_by_chance(num_chunks: int, num_drafts: int, rates_K: torch.Tensor) -> torch.Tensor:
    """Return at random which drafts are accepted, bool [D, K]. For measuring speed.

    Accepted drafts become output, so the text is meaningless.
    """
    chance_DK = torch.rand(num_chunks, num_drafts, device=rates_K.device)
    return chance_DK < rates_K[:num_drafts]
