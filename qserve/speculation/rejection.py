"""Rejection sampling: `--spec-acceptance rejection`.

This is the method of Leviathan et al. (arXiv 2211.17192) and Chen et al. (2302.01318). A draft x
that was sampled from q is accepted with probability min(1, p(x) / q(x)). p is the model's
distribution for the row, with all filters and penalties. Instead of the first rejected draft, a
token is sampled from the normalized positive part of p - q. If all drafts are accepted, the bonus
token is sampled from p.

The output has the model's distribution, whatever q is. But the text differs from the text without
drafts. More drafts are accepted than with the shared noise of `exact`. For a draft that was not
sampled (n-gram, greedy), q is a point mass.

Suffixes of tensor names:

    S: sampled rows
    D: chunks that sample
    V: vocabulary
    W: rows of the history table
    K: drafts
    P: sampling words
"""

from collections.abc import Callable
from functools import partial

import torch

from qkernels.sampling.reference import (
    MIN_TEMPERATURE,
    adjust,
    filter_logits,
    gumbel_noise,
    row_logprobs,
)
from qkernels.sampling.settings import INVALID_TOKEN, Samples, SampleSettings
from qkernels.sampling.words import HISTORY_ROW, SEED
from qserve.speculation import typical
from qserve.speculation.acceptance import Verify
from qserve.speculation.config import SpeculativeConfig

# (p_DV, q_DV, drafts_D, is_draft_D, seed_D, position_D) -> (tokens_D, passes_D), see `judge`
Judge = Callable[..., tuple[torch.Tensor, torch.Tensor]]

# A draft and its replacement must be sampled with different noise. The same noise would bias the
# output, since it makes the rejected token likely again.
DRAFT_SALT = 0x5DEECE66D
CHANCE_SALT = 0x2545F4914F6CDD1D


def probabilities(
    logits_SV: torch.Tensor, settings: SampleSettings, history_WV: torch.Tensor | None = None
) -> torch.Tensor:
    """Return each row's sampling distribution, float32 [S, V]; a point mass at temperature 0."""
    adjusted_SV = adjust(logits_SV.float(), settings, history_WV)
    temperature_S1 = settings.column("temperature")[:, None]
    scaled_SV = adjusted_SV / temperature_S1.clamp(min=MIN_TEMPERATURE)
    if settings.any_filter:
        filters = (settings.column(name) for name in ("min_p", "top_k", "top_p"))
        scaled_SV = filter_logits(scaled_SV, *filters)
    best_S = adjusted_SV.argmax(-1)
    point_SV = torch.zeros_like(adjusted_SV).scatter_(1, best_S[:, None], 1.0)
    return torch.where(temperature_S1 == 0, point_SV, scaled_SV.softmax(-1))


def salted(words_SP: torch.Tensor, salt: int) -> torch.Tensor:
    """Return the settings of the same rows with independent noise."""
    words_SP = words_SP.clone()
    words_SP[:, SEED] ^= salt
    return words_SP


def judge(
    p_DV: torch.Tensor,
    q_DV: torch.Tensor | None,
    drafts_D: torch.Tensor,
    is_draft_D: torch.Tensor,
    seed_D: torch.Tensor,
    position_D: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept or reject one draft per chunk. Returns the tokens, int64 [D], and what was accepted.

    is_draft_D: False for the last row of a chunk, which has no draft
    q_DV: distributions of the drafts; None: all are point masses
    """
    V = p_DV.shape[1]
    drafts_D1 = drafts_D[:, None]
    if q_DV is None:
        q_DV = torch.zeros_like(p_DV).scatter_(1, drafts_D1, 1.0)
    gumbel_D1 = gumbel_noise(seed_D ^ CHANCE_SALT, position_D, 1)
    chance_D = torch.exp(-torch.exp(-gumbel_D1[:, 0]))  # uniform
    p_D, q_D = p_DV.gather(1, drafts_D1)[:, 0], q_DV.gather(1, drafts_D1)[:, 0]
    passes_D = is_draft_D & (chance_D * q_D < p_D)
    # If p and q are equal, p - q may have no positive part. Then a rejection is a rounding error.
    more_DV = (p_DV - q_DV).clamp(min=0)
    left_DV = torch.where(more_DV.sum(1, keepdim=True) > 0, more_DV, p_DV)
    from_DV = torch.where(is_draft_D[:, None], left_DV, p_DV)
    drawn_D = (from_DV.log() + gumbel_noise(seed_D, position_D, V)).argmax(-1)
    return torch.where(passes_D, drafts_D, drawn_D), passes_D


def judge_of(config: SpeculativeConfig) -> Judge:
    """Return the acceptance rule of a config with `judges_by_row`."""
    return partial(typical.judge, config=config) if config.acceptance == "typical" else judge


def draw_verify(
    logits_SV: torch.Tensor,
    settings: SampleSettings,
    history_WV: torch.Tensor | None,
    verify: Verify,
    q_DKV: torch.Tensor | None,
    judge: Judge = judge,
) -> tuple[Samples, torch.Tensor]:
    """Return the tokens of all rows, and the number of accepted drafts per chunk, int64 [D].

    All chunks advance row by row, since penalties depend on the tokens before. Emitted tokens are
    added to `history_WV`. Tokens of rows after a chunk's first rejection have no meaning.
    """
    words_SP, position_S = settings.words_SP, settings.column("position")
    tokens_S = torch.zeros(len(words_SP), dtype=torch.int64, device=words_SP.device)
    alive_D = torch.ones_like(verify.first_D, dtype=torch.bool)
    accepted_D = torch.zeros_like(verify.first_D)
    for column in range(verify.most):
        # Shorter chunks repeat their last row, without effect.
        exists_D = alive_D & (column < verify.count_D)
        row_D = verify.first_D + verify.count_D.sub(1).clamp(max=column)
        words_DP = words_SP[row_D]
        words_DP[:, HISTORY_ROW] = torch.where(exists_D, words_DP[:, HISTORY_ROW], -1)
        of_rows = settings.of_rows(words_DP)
        p_DV = probabilities(logits_SV[row_D], of_rows, history_WV)
        q_DV = None if q_DKV is None else q_DKV[:, min(column, q_DKV.shape[1] - 1)]
        token_D, passes_D = judge(
            p_DV,
            q_DV,
            verify.drafts_S[row_D],
            column < verify.count_D - 1,
            of_rows.column("seed"),
            position_S[row_D],
        )
        invalid_D = logits_SV[row_D].isnan().any(-1)
        token_D, passes_D = token_D.masked_fill(invalid_D, INVALID_TOKEN), passes_D & ~invalid_D
        tokens_S[row_D] = torch.where(exists_D, token_D, tokens_S[row_D])
        if history_WV is not None:
            row_H = words_DP[:, HISTORY_ROW]
            counted_D = (row_H >= 0) & (token_D >= 0)
            index = row_H.clamp(min=0), token_D.clamp(min=0)
            history_WV.index_put_(index, 2 * counted_D.int(), accumulate=True)
        alive_D = exists_D & passes_D
        accepted_D += alive_D
    if settings.num_logprobs < 0:
        return Samples(tokens_S, None, None, None), accepted_D
    return Samples(tokens_S, *row_logprobs(logits_SV.float(), tokens_S, settings)), accepted_D
