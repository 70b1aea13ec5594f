"""TokenFilter: masks for `allowed_token_ids` and `bad_words`.

A mask is a row of int64 words, one bit per token: token t is bit t % 64 of word t // 64, and a bit
of 1 allows the token.
"""

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from qkernels.sampling.words import MASK_BITS


class TokenFilter:
    """The token filter of one output. The part that ignores previous tokens is computed once."""

    def __init__(
        self,
        vocab_size: int,
        allowed: Sequence[int] | None,
        forbidden: Iterable[Sequence[int]],
    ) -> None:
        """`allowed`: None: all tokens. `forbidden`: token sequences that must not be completed."""
        bits = np.zeros(-(-vocab_size // MASK_BITS) * MASK_BITS, bool)
        bits[slice(vocab_size) if allowed is None else list(allowed)] = True
        # second last token of a sequence -> (tokens before the last, last token)
        self._last: dict[int, list[tuple[Sequence[int], int]]] = {}
        for sequence in forbidden:
            *before, last = sequence
            if before:
                self._last.setdefault(before[-1], []).append((before, last))
            else:
                bits[last] = False
        self._mask = np.packbits(bits, bitorder="little").view(np.int64)

    @property
    def follows_output(self) -> bool:
        """True if the mask depends on previous tokens."""
        return bool(self._last)

    def mask(self, token_ids: Sequence[int], start: int) -> np.ndarray:
        """Return the mask of the token after `token_ids`. The caller must not modify it.

        Only forbidden sequences that begin at `start` or later count.
        """
        if len(token_ids) <= start:
            return self._mask
        ended = [
            last
            for before, last in self._last.get(token_ids[-1], ())
            if len(token_ids) - start >= len(before) and token_ids[-len(before) :] == before
        ]
        return without(self._mask, ended) if ended else self._mask


def without(mask: np.ndarray, token_ids: Collection[int]) -> np.ndarray:
    """Return a copy of the mask that also forbids these tokens."""
    mask = mask.copy()
    for token in token_ids:
        mask[token // MASK_BITS] &= ~np.left_shift(np.int64(1), np.int64(token % MASK_BITS))
    return mask
