"""Typical acceptance (Medusa, arXiv 2401.10774, section 2.3.1): `--spec-acceptance typical`.

A draft x is accepted if its probability is above a threshold that falls with the entropy H of p:

    p(x) > min(posterior_threshold, posterior_alpha * exp(-H(p)))        H in nats

p is the sampling distribution of the row, with temperature, filters, penalties and masks. In place
of the first rejected draft, a token is sampled from p.

This is lossy: nothing corrects for accepted drafts, so tokens that the drafter prefers are too
frequent in the output. At temperature 0, p is a point mass and only the likeliest token is
accepted, so the text is the same as without drafts.

Suffixes of tensor names: D chunks that sample, V vocabulary.
"""

import torch

from qkernels.sampling.reference import gumbel_noise
from qserve.speculation.config import SpeculativeConfig


def least_likelihood(p_DV: torch.Tensor, config: SpeculativeConfig) -> torch.Tensor:
    """Return the minimum probability of a draft in each row, [D]."""
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
    """Accept or reject one draft per chunk, see rejection.judge. Ignores `q_DV`."""
    p_D = p_DV.gather(1, drafts_D[:, None])[:, 0]
    passes_D = is_draft_D & (p_D > least_likelihood(p_DV, config))
    drawn_D = (p_DV.log() + gumbel_noise(seed_D, position_D, p_DV.shape[1])).argmax(-1)
    return torch.where(passes_D, drafts_D, drawn_D), passes_D
