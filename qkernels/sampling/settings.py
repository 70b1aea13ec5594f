"""What `sample_` is told of each row, and what it returns. Knows no request and no kernel.

Everything a row is told is packed into 64-bit words, so that a step needs one copy to the device.
Legend: S rows, P words of a row, E bias entries, N alternatives.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch

INVALID_TOKEN = -1  # stands for a row whose logits hold NaN
MAX_LOGPROBS = 20  # alternatives of one row


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """How to draw one row's token.

    The order of work: bias, mask, penalties, temperature, min_p, top_k, top_p. Where values are
    equal the lower token id counts as likelier. Log probabilities are of the logits as they came.
    """

    temperature: float = 0.0  # 0: greedy; no filter matters then
    top_p: float = 1.0  # keep the likeliest until their share of what is left reaches this
    min_p: float = 0.0  # drop what is less likely than this share of the likeliest
    presence_penalty: float = 0.0  # subtracted from tokens of the output
    frequency_penalty: float = 0.0  # subtracted once for each time in the output
    repetition_penalty: float = 1.0  # divides positive, multiplies negative logits; prompt too
    top_k: int = 0  # keep the k likeliest; 0: all
    seed: int = 0
    position: int = 0  # of the token that is drawn; the noise follows from seed, position, token
    history_row: int = -1  # the row of the history table; -1: no penalties
    num_logprobs: int = -1  # alternatives to report; -1: not even the drawn token's
    mask_start: int = -1  # where in bias_E a bit for each token begins, 1 allows it; -1: all may be
    bias: tuple[tuple[int, float], ...] = ()  # (token, added to its logit); -inf forbids it

    @property
    def filters(self) -> bool:
        chooses = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return self.temperature > 0 and chooses


FLOATS = tuple(field.name for field in fields(SampleRow) if field.type is float)
INTEGERS = tuple(field.name for field in fields(SampleRow) if field.type is int)
NUMBERS = FLOATS + INTEGERS  # the words of a row, in order
BIAS_START, BIAS_END = len(NUMBERS), len(NUMBERS) + 1  # then its entries of bias_E
NUM_WORDS = len(NUMBERS) + 2
TEMPERATURE, TOP_P, MIN_P, TOP_K, POSITION = map(
    NUMBERS.index, ("temperature", "top_p", "min_p", "top_k", "position")
)
SEED, HISTORY_ROW, NUM_LOGPROBS, MASK_START = map(
    NUMBERS.index, ("seed", "history_row", "num_logprobs", "mask_start")
)
MASK_BITS = 64  # tokens of a word of a mask
_floats_of, _integers_of = attrgetter(*FLOATS), attrgetter(*INTEGERS)


class Samples(NamedTuple):
    """What was drawn. The last three are None where no row asked for log probabilities."""

    tokens_S: torch.Tensor  # int64, INVALID_TOKEN where a row's logits hold NaN
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
        """Of rows that `pack_row` and `pack_bias` packed, with the ends of each row's biases."""
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
        """Of other rows, or the same ones changed, whose biases and masks are among these."""
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


def pack_row(row: SampleRow) -> tuple[int, ...]:
    """The first words of a row: its numbers, without its biases."""
    return (*_bits(*_floats_of(row)), *_integers_of(row))


def pack_bias(row: SampleRow) -> list[int]:
    """A row's entries of bias_E."""
    return [token << 32 | _bits(value)[0] for token, value in row.bias]


def _bits(*values: float) -> tuple[int, ...]:
    """The float32 bits of numbers, 0 to 2^32 - 1."""
    return struct.unpack(f"<{len(values)}I", struct.pack(f"<{len(values)}f", *values))


ONE = _bits(1.0)[0]
