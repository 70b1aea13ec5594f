"""Draws: samples a device drafter's tokens with the same noise as the model.

The model samples the token of a position as argmax(logits + noise(seed, position, token)). With the
same noise, a draft agrees far more often than with independent noise (Daliri, Musco, Suresh, arXiv
2408.07978).

Suffixes of tensor names: D requests that draft, K drafts, P sampling words, V vocabulary.
"""

from dataclasses import dataclass

import torch

from qkernels import ops
from qkernels.sampling.settings import SampleSettings
from qserve.speculation.rejection import DRAFT_SALT, probabilities, salted


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Sampling settings of the drafts of one step."""

    words_KDP: torch.Tensor  # int64: settings of each draft, in the layout of SampleSettings
    any_random: bool
    any_filter: bool
    is_greedy: bool = False  # True: take the likeliest token, whatever the request's settings
    # With `rejection`: receives the distribution of each draft, [D, V].
    kept: list[torch.Tensor] | None = None

    def draw(self, logits_DV: torch.Tensor, index: int) -> torch.Tensor:
        """Sample draft number `index`. Returns token ids, int64 [D]."""
        return self._draw(logits_DV, self.words_KDP[index], 1)

    def draw_all(self, logits_KDV: torch.Tensor) -> torch.Tensor:
        """Sample drafts 0 .. K - 1 together. Returns token ids, int64 [K, D]."""
        K, D, _ = logits_KDV.shape
        words_KDP = self.words_KDP[:K].flatten(0, 1)
        return self._draw(logits_KDV.flatten(0, 1), words_KDP, K).view(K, D)

    def _draw(
        self, logits_DV: torch.Tensor, words_DP: torch.Tensor, num_drafts: int
    ) -> torch.Tensor:
        if self.is_greedy:
            return logits_DV.argmax(-1)
        settings = SampleSettings(
            words_SP=words_DP,
            bias_E=words_DP.new_empty(0),
            any_random=self.any_random,
            any_filter=self.any_filter,
            num_logprobs=-1,
            invalid_token=0,
        )
        if self.kept is not None:
            self.kept.extend(probabilities(logits_DV, settings).chunk(num_drafts))
            settings = settings.of_rows(salted(words_DP, DRAFT_SALT))
        return ops.sample_(logits_DV, settings, None).tokens_S
