"""Compare the predictions of two models on the same text, one window at a time.

Legend: W windows, S tokens of a window, V vocabulary.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from calibrate.texts.evaluate import IGNORED, Window, ids_of, targets_of
from formats.errors import InputError

ROWS = 128  # positions compared at a time, to limit memory with large vocabularies
Logits = Callable[[Any], torch.Tensor]  # window -> logits [S, V] for the token after each position


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Perplexities of a reference and of another model, and their distance."""

    windows: int
    sequence_length: int  # length of the longest window
    tokens: int  # predicted tokens
    reference_perplexity: float
    perplexity: float
    divergence: float  # mean KL(reference || other) in nats per token
    largest_divergence: float  # largest KL divergence of one token
    same_top_token: float  # fraction of positions with the same most likely token


class AgreementSum:
    """Accumulates an Agreement over windows."""

    def __init__(self) -> None:
        self.windows = self.length = self.tokens = self.same = 0
        self.nll = [0.0, 0.0]  # of the reference, of the other
        self.divergence = self.largest = 0.0

    def add(
        self,
        window: Window,
        reference_SV: torch.Tensor,
        other_SV: torch.Tensor,
        given: Iterable[int] = (),
    ) -> None:
        """Add a window. `given`: token ids that are not counted, such as BOS before a text.

        Raises InputError if logits are not finite.
        """
        self.windows += 1
        self.length = max(self.length, len(ids_of(window)))
        targets_S = targets_of(window, torch.tensor(sorted(given), dtype=torch.long))
        for begin in range(0, len(targets_S), ROWS):
            rows_R = begin + (targets_S[begin : begin + ROWS] != IGNORED).nonzero()[:, 0]
            if not len(rows_R):
                continue
            own_R = rows_R.to(reference_SV.device)
            reference_RV = reference_SV[own_R].float().log_softmax(-1)
            other_RV = other_SV[rows_R.to(other_SV.device)].to(reference_RV.device).float()
            other_RV = other_RV.log_softmax(-1)
            self._add_rows(targets_S[rows_R].to(reference_RV.device), reference_RV, other_RV)

    def _add_rows(
        self, targets_R: torch.Tensor, reference_RV: torch.Tensor, other_RV: torch.Tensor
    ) -> None:
        """Add positions, with the log probabilities of both models."""
        for index, (name, rows_RV) in enumerate(
            (("the reference's", reference_RV), ("the model's", other_RV))
        ):
            nll = -float(rows_RV.gather(1, targets_R[:, None]).double().sum())
            if not math.isfinite(nll):
                raise InputError(
                    f"window {self.windows}",
                    f"{name} logits contain NaN or infinity",
                    "look for NaN weights, or evaluate in float32",
                )
            self.nll[index] += nll
        divergence_RV = torch.nn.functional.kl_div(
            other_RV, reference_RV, log_target=True, reduction="none"
        )
        divergence_R = divergence_RV.sum(-1).double().clamp(min=0)
        self.divergence += float(divergence_R.sum())
        self.largest = max(self.largest, float(divergence_R.max()))
        self.same += int((reference_RV.argmax(-1) == other_RV.argmax(-1)).sum())
        self.tokens += len(targets_R)

    def result(self) -> Agreement:
        """Return the means over all windows. Raises InputError if no token was counted."""
        if not self.tokens:
            raise InputError("windows", "contain no token to predict", "use a longer text")
        reference, other = (_exp(nll / self.tokens) for nll in self.nll)
        return Agreement(
            windows=self.windows,
            sequence_length=self.length,
            tokens=self.tokens,
            reference_perplexity=reference,
            perplexity=other,
            divergence=self.divergence / self.tokens,
            largest_divergence=self.largest,
            same_top_token=self.same / self.tokens,
        )


def compare_logits(
    windows: torch.Tensor | Sequence[Window],
    reference: Logits,
    other: Logits,
    given: Iterable[int] = (),
    progress: bool = True,
) -> Agreement:
    """Run both models on each window and compare them. Memory holds the logits of one window."""
    total = AgreementSum()
    with tqdm(windows, unit="window", disable=not progress) as bar:
        for window in bar:
            total.add(window, reference(window), other(window), given)
    return total.result()


def _exp(mean: float) -> float:
    return math.exp(mean) if mean < 700 else math.inf
