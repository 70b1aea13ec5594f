"""Draws: how a device drafter's tokens are drawn, with the noise of the requests that they are for.

The model draws the token of a position as argmax(logits + noise(seed, position, token)). A draft
that is drawn with the same noise agrees far more often than one that is not (Daliri, Musco, Suresh,
arXiv 2408.07978). Legend: D requests that draft, K drafts, P words of sampling, V vocabulary.
"""

from dataclasses import dataclass

import torch

from qkernels import ops
from qkernels.sampling.settings import SampleSettings
from qserve.speculation.rejection import DRAFT_SALT, probabilities, salted


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Of the requests of one step."""

    words_KDP: torch.Tensor  # int64, as SampleSettings has them, of each draft
    any_random: bool
    any_filter: bool
    is_greedy: bool = False  # the likeliest token, whatever the request asks for
    # with `rejection`: filled with what each draft was drawn from, [D, V]
    kept: list[torch.Tensor] | None = None

    def draw(self, logits_DV: torch.Tensor, index: int) -> torch.Tensor:
        """The tokens of draft number `index`, int64 [D]."""
        if self.is_greedy:
            return logits_DV.argmax(-1)
        words_DP = self.words_KDP[index]
        settings = SampleSettings(
            words_SP=words_DP,
            bias_E=words_DP.new_empty(0),
            any_random=self.any_random,
            any_filter=self.any_filter,
            num_logprobs=-1,
            invalid_token=0,
        )
        if self.kept is not None:
            self.kept.append(probabilities(logits_DV, settings))
            settings = settings.of_rows(salted(words_DP, DRAFT_SALT))
        return ops.sample_(logits_DV, settings, None).tokens_S
