"""Draws: sampling of a device drafter's tokens, with the noise of their requests.

The model samples the token of a position as argmax(logits + noise(seed, position, token)). A draft
sampled with the same noise agrees far more often than one with other noise (Daliri, Musco, Suresh,
arXiv 2408.07978). Legend: D requests that draft, K drafts, P words of sampling, V vocabulary.
"""

from dataclasses import dataclass

import torch

from qkernels import ops
from qkernels.sampling.settings import SampleSettings
from qserve.speculation.rejection import DRAFT_SALT, probabilities, salted


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Sampling settings of the requests of one step."""

    words_KDP: torch.Tensor  # int64, of each draft, in the layout of SampleSettings
    any_random: bool
    any_filter: bool
    is_greedy: bool = False  # the most likely token, whatever the request's settings
    # with `rejection`: collects the distribution of each draft, [D, V]
    kept: list[torch.Tensor] | None = None

    def draw(self, logits_DV: torch.Tensor, index: int) -> torch.Tensor:
        """Sample draft number `index`: token ids, int64 [D]."""
        return self._draw(logits_DV, self.words_KDP[index], 1)

    def draw_all(self, logits_KDV: torch.Tensor) -> torch.Tensor:
        """Sample drafts 0 .. K - 1, whose logits are known together: token ids, int64 [K, D]."""
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
