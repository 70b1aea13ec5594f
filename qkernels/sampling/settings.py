"""Arguments and results of `sample_` for all rows.

All settings of a row are packed into 64-bit words (words.py), so that a step needs one copy to
the device.
Legend: S rows, P words of a row, E bias entries, N alternatives.
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

INVALID_TOKEN = -1  # marks a row whose logits hold NaN
MAX_LOGPROBS = 20  # alternatives of one row


class Samples(NamedTuple):
    """Drawn tokens. The last three are None where no row asked for log probabilities."""

    tokens_S: torch.Tensor  # int64, SampleSettings.invalid_token where a row's logits hold NaN
    logprobs_S: torch.Tensor | None  # float32, of the drawn tokens
    top_tokens_SN: torch.Tensor | None  # int64, likeliest first, -1 beyond what the row asked for
    top_logprobs_SN: torch.Tensor | None  # float32, -inf there


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSettings:
    """All rows of one call. Made by `of`."""

    words_SP: torch.Tensor  # int64; a float is its float32 bits
    # int64: token << 32 | float32 bits; and masks, token t is bit t % 64 of word t // 64
    bias_E: torch.Tensor
    any_random: bool
    any_filter: bool
    num_logprobs: int  # the most that any row asks for; -1: none asks
    any_history: bool = False  # penalties
    invalid_token: int = INVALID_TOKEN  # 0 where tokens are indices and no row has penalties

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
        """Settings of rows from `pack_row` and `pack_bias`, with the ends of each row's biases."""
        temperature_S, top_k_S = words_SP[:, TEMPERATURE], words_SP[:, TOP_K]
        # bits of floats that are not negative are in the order of the floats
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
        """Settings of other or changed rows whose biases and masks are among these."""
        return replace(self, words_SP=words_SP)

    def to(self, device: torch.device) -> "SampleSettings":
        """Copy to the device without waiting for it."""
        if device.type != "cuda":
            return self
        words_SP, bias_E = (
            tensor.pin_memory().to(device, non_blocking=True)
            for tensor in (self.words_SP, self.bias_E)
        )
        return replace(self, words_SP=words_SP, bias_E=bias_E)

    def column(self, name: str) -> torch.Tensor:
        """One field of all rows: [S], float32 or int64."""
        column_S = self.words_SP[:, NUMBERS.index(name)]
        return column_S.to(torch.int32).view(torch.float32) if name in FLOATS else column_S
