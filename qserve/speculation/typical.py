"""Typical acceptance (Medusa, arXiv 2401.10774, section 2.3.1): `--spec-acceptance typical`. Lossy.

A draft x is accepted if its probability is high enough for the model's certainty:

    p(x) > min(posterior_threshold, posterior_alpha * exp(-H(p)))        H in nats

p is the sampling distribution of the row's token: with temperature, filters, penalties and masks.
At the first rejected draft the token is sampled from p, as usual. Nothing corrects for the accepted
drafts, so the output does not have the model's distribution: the drafter's favourites are
over-represented. At temperature 0, p is a point mass and only the most likely token is accepted:
the text is the one without drafts.

Legend: D chunks that sample, V vocabulary.
"""

import torch

from qkernels.sampling.reference import gumbel_noise
from qserve.speculation.config import SpeculativeConfig


def least_likelihood(p_DV: torch.Tensor, config: SpeculativeConfig) -> torch.Tensor:
    """Minimum probability of a draft in each row, [D]."""
    threshold, alpha = config.posterior
    entropy_D = torch.special.entr(p_DV).sum(-1)
    return (alpha * torch.exp(-entropy_D)).clamp(max=threshold)


def judge(
    p_DV: torch.Tensor,
    q_DV: torch.Tensor | None,
    drafts_D: torch.Tensor,
    is_draft_D: torch.Tensor,
    seed_D: torch.Tensor,
    position_D: torch.Tensor,
    config: SpeculativeConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See rejection.judge. `q_DV`, the drafts' distribution, is ignored."""
    p_D = p_DV.gather(1, drafts_D[:, None])[:, 0]
    passes_D = is_draft_D & (p_D > least_likelihood(p_DV, config))
    drawn_D = (p_DV.log() + gumbel_noise(seed_D, position_D, p_DV.shape[1])).argmax(-1)
    return torch.where(passes_D, drafts_D, drawn_D), passes_D
