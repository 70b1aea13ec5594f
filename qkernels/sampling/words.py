"""Settings of one row for `sample_`, as 64-bit words. This module does not import torch.

Legend: P words of a row, E bias entries.
"""

import struct
from dataclasses import dataclass, fields
from operator import attrgetter


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """How to draw one row's token.

    Steps run in this order: bias, mask, penalties, temperature, min_p, top_k, top_p. If values are
    equal, the lower token id ranks higher. Log probabilities are those of the unchanged logits.
    """

    temperature: float = 0.0  # 0: greedy, and filters have no effect
    top_p: float = 1.0  # keep the likeliest tokens until their total probability reaches this
    min_p: float = 0.0  # drop tokens below this fraction of the likeliest token's probability
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the output
    frequency_penalty: float = 0.0  # subtracted once for each occurrence in the output
    repetition_penalty: float = 1.0  # divides positive, multiplies negative logits; prompt too
    top_k: int = 0  # keep the k likeliest tokens; 0: all
    seed: int = 0
    position: int = 0  # position of the drawn token; the noise depends on seed, position, token
    history_row: int = -1  # row of the history table; -1: no penalties
    num_logprobs: int = -1  # alternatives to report; -1: no log probabilities at all
    mask_start: int = -1  # index in bias_E of a mask, whose bit 1 allows a token; -1: no mask
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
MASK_BITS = 64  # tokens per word of a mask
_floats_of, _integers_of = attrgetter(*FLOATS), attrgetter(*INTEGERS)


def pack_row(row: SampleRow) -> tuple[int, ...]:
    """Return the first words of a row: its numbers, without its biases."""
    return (*_bits(*_floats_of(row)), *_integers_of(row))


def pack_bias(row: SampleRow) -> list[int]:
    """Return a row's entries of bias_E."""
    return [token << 32 | _bits(value)[0] for token, value in row.bias]


def _bits(*values: float) -> tuple[int, ...]:
    """Return the float32 bits of numbers as integers from 0 to 2^32 - 1."""
    return struct.unpack(f"<{len(values)}I", struct.pack(f"<{len(values)}f", *values))


ONE = _bits(1.0)[0]
