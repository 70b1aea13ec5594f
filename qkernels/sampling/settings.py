"""Arguments and results of `sample_`.

All settings of a row are packed into 64-bit words (words.py), so that a step needs one copy to the
device. Legend: S rows, P words of a row, E bias entries, N alternatives.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from qkernels.sampling.words import (
    FLOATS,
    HISTORY_ROW,
    MIN_P,
    NUM_LOGPROBS,
    NUM_WORDS,
    NUMBERS,
    ONE,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    SampleRow,
    pack_bias,
    pack_row,
)

INVALID_TOKEN = -1  # token of a row whose logits contain NaN
MAX_LOGPROBS = 20  # most alternatives of a row


class Samples(NamedTuple):
    """Drawn tokens. The last three fields are None if no row asked for log probabilities."""

    tokens_S: torch.Tensor  # int64; SampleSettings.invalid_token if a row's logits contain NaN
    logprobs_S: torch.Tensor | None  # float32, of the drawn tokens
    top_tokens_SN: torch.Tensor | None  # int64, likeliest first; -1 beyond the row's num_logprobs
    top_logprobs_SN: torch.Tensor | None  # float32; -inf beyond the row's num_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSettings:
    """Settings of all rows of one call. Made by `of`."""

    words_SP: torch.Tensor  # int64; a float is its float32 bits
    # int64: biases, as token << 32 | float32 bits, then masks, where token t is bit t % 64 of word
    # t // 64
    bias_E: torch.Tensor
    any_random: bool
    any_filter: bool
    num_logprobs: int  # the largest number that a row asks for; -1: no row asks
    any_history: bool = False  # a row has penalties
    invalid_token: int = INVALID_TOKEN  # 0 if tokens are used as indices and no row has penalties

    @classmethod
    def of(cls, rows: Sequence[SampleRow]) -> "SampleSettings":
        """Pack rows, on the host."""
        words, biases = [], []
        for row in rows:
            start = len(biases)
            biases += pack_bias(row)
            words.append((*pack_row(row), start, len(biases)))
        words_SP = np.array(words, np.int64).reshape(-1, NUM_WORDS)
        return cls.of_words(words_SP, np.array(biases, np.int64))

    @classmethod
    def of_words(cls, words_SP: np.ndarray, bias_E: np.ndarray) -> "SampleSettings":
        """Make settings from the words of rows and their biases.

        A row's words are `pack_row` and the range of its entries in `bias_E`, which are
        `pack_bias`.
        """
        temperature_S, top_k_S = words_SP[:, TEMPERATURE], words_SP[:, TOP_K]
        # the bits of non-negative floats sort like the floats
        chooses_S = (top_k_S > 0) | (words_SP[:, TOP_P] < ONE) | (words_SP[:, MIN_P] > 0)
        return cls(
            words_SP=torch.from_numpy(words_SP),
            bias_E=torch.from_numpy(bias_E),
            any_random=bool((temperature_S > 0).any()),
            any_filter=bool(((temperature_S > 0) & chooses_S).any()),
            num_logprobs=int(words_SP[:, NUM_LOGPROBS].max(initial=-1)),
            any_history=bool((words_SP[:, HISTORY_ROW] >= 0).any()),
        )

    def of_rows(self, words_SP: torch.Tensor) -> "SampleSettings":
        """Return the settings of other or changed rows, whose biases and masks are among these."""
        return replace(self, words_SP=words_SP)

    def to(self, device: torch.device) -> "SampleSettings":
        """Copy to a device without waiting for it."""
        if device.type != "cuda":
            return self
        words_SP, bias_E = (
            tensor.pin_memory().to(device, non_blocking=True)
            for tensor in (self.words_SP, self.bias_E)
        )
        return replace(self, words_SP=words_SP, bias_E=bias_E)

    def column(self, name: str) -> torch.Tensor:
        """Return one field of all rows: [S], float32 or int64."""
        column_S = self.words_SP[:, NUMBERS.index(name)]
        return column_S.to(torch.int32).view(torch.float32) if name in FLOATS else column_S
