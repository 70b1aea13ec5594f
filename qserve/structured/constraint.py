"""Constraint: one output's grammar and how far the output has got in it. Knows no request.

A mask is a row of int32 words, a bit for each token: token t is bit t & 31 of word t >> 5, and 1
allows it.
"""

from collections.abc import Iterable, Sequence
from time import thread_time
from typing import Any

import numpy as np

# Of all masks of one output, of a processor. One takes 10 to 100 us; a grammar made to be slow
# takes a thread (engine/mask_jobs.py) for so long at most, and one mask more.
MAX_MASK_SECONDS = 2.0
SLOW_MASK_SECONDS = 0.005


class SlowMasks:
    """Of an output and its drafts: the seconds of masks that took long."""

    def __init__(self) -> None:
        self.seconds = 0.0


class Constraint:
    """A matcher of llguidance. Made by GrammarCompiler."""

    def __init__(
        self,
        matcher: Any,
        vocab_size: int,
        model_ends: Iterable[int],
        slow: SlowMasks | None = None,
    ) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._model_ends = tuple(model_ends)  # which the matcher allows where it accepts
        self._slow = slow or SlowMasks()
        self.error = ""  # why the output cannot go on, once that is so

    @property
    def is_slow(self) -> bool:
        """Whether any of its masks took long."""
        return self._slow.seconds > 0

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow any more."""
        return not self.error and self._matcher.is_stopped()

    def take(self, token: int) -> None:
        """Go on by a token of the output."""
        if not self.error and not self._matcher.consume_token(token):
            self._fail(self._matcher.get_error())

    def copy(self) -> "Constraint":
        """One that goes on by itself: along drafts."""
        copy = Constraint(self._matcher.deep_copy(), self._vocab_size, self._model_ends, self._slow)
        copy.error = self.error
        return copy

    def num_valid(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may follow, one after the other."""
        return 0 if self.error else self._matcher.validate_tokens(list(tokens))

    def mask(self, ends: Iterable[int], may_end: bool) -> np.ndarray:
        """The mask of the next token, in words of 64 bits."""
        words = np.zeros(2 * -(-self._vocab_size // 64), np.int32)
        self.fill_(words[: num_mask_words(self._vocab_size)], ends, may_end)
        return words.view(np.int64)

    def fill_(self, words: np.ndarray, ends: Iterable[int], may_end: bool) -> None:
        """Write the mask of the next token; `ends` are the tokens that end the output.

        They are allowed where the grammar may end, and `may_end` False forbids them as long as
        something else is allowed. Where there is an error the mask allows all.
        """
        started = thread_time()
        if not self.error:
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if self._matcher.is_error():
                self._fail(self._matcher.get_error())
        if self.error:
            words[:] = -1
            return
        self._set_ends_(words, tuple(ends), may_end)
        self._watch(thread_time() - started)

    def _set_ends_(self, words: np.ndarray, ends: tuple[int, ...], may_end: bool) -> None:
        if not self._matcher.is_accepting():
            return
        for token in self._model_ends:
            words[token >> 5] &= ~_bit(token)
        goes_on = bool(words.any())
        if goes_on and not may_end:
            return
        for token in ends or (() if goes_on else self._model_ends):
            words[token >> 5] |= _bit(token)

    def _watch(self, seconds: float) -> None:
        if seconds < SLOW_MASK_SECONDS:
            return
        self._slow.seconds += seconds
        if self._slow.seconds > MAX_MASK_SECONDS:
            self._fail("too complex: its masks take too long")

    def _fail(self, reason: str) -> None:
        self.error = " ".join(reason.split("<non-verbose/>")[0].split()) or "the grammar failed"


def num_mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def _bit(token: int) -> np.int32:
    return np.uint32(1 << (token & 31)).view(np.int32)
