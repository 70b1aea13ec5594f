"""Constraint: the grammar of one output, and the output's state in the grammar.

A mask is a row of int32 words with one bit per token. Token t has bit t & 31 of word t >> 5; 1
allows the token.
"""

from collections.abc import Iterable, Sequence
from time import thread_time
from typing import Any

import numpy as np

from formats.errors import one_line
from qserve.structured.backend import call

# Limit on the CPU seconds for all slow masks of one output. A mask usually takes 10 to 100 us. A
# malicious grammar occupies a thread (engine/step/mask_jobs.py) for at most this time and one mask.
MAX_MASK_SECONDS = 2.0
SLOW_MASK_SECONDS = 0.005


class SlowMasks:
    """CPU seconds spent on slow masks of an output and its drafts."""

    def __init__(self) -> None:
        self.seconds = 0.0


class Constraint:
    """Wraps a matcher of llguidance for one output. GrammarCompiler creates it.

    An error of llguidance ends only this output: it is stored in `error`.
    """

    def __init__(
        self,
        matcher: Any,
        vocab_size: int,
        model_ends: Iterable[int],
        slow: SlowMasks | None = None,
    ) -> None:
        self._compiled = matcher  # initial state, shared with other outputs
        self._own: Any = None  # this output's copy, made on first use
        self._vocab_size = vocab_size
        self._model_ends = tuple(model_ends)  # the matcher allows these where the grammar may end
        self._slow = slow or SlowMasks()
        self.error = ""  # reason why the output cannot continue; "": no error

    @property
    def is_slow(self) -> bool:
        """True if any mask of this output was slow."""
        return self._slow.seconds > 0

    @property
    def is_complete(self) -> bool:
        """True if no further token is possible."""
        return not self.error and bool(self._call("is_stopped"))

    def take(self, token: int) -> None:
        """Advance by one token of the output."""
        if not self.error and not self._call("consume_token", token) and not self.error:
            self._fail(self._matcher.get_error())

    def copy(self) -> "Constraint":
        """Return a copy that advances independently, along a draft."""
        matcher = self._matcher if self.error else self._call("deep_copy")
        copy = Constraint(matcher, self._vocab_size, self._model_ends, self._slow)
        copy._own, copy.error = matcher, self.error
        return copy

    def num_valid(self, tokens: Sequence[int]) -> int:
        """Return the number of leading tokens that the grammar accepts."""
        return 0 if self.error else self._call("validate_tokens", list(tokens)) or 0

    def mask(self, ends: Iterable[int], may_end: bool) -> np.ndarray:
        """Return the mask of the next token, in 64-bit words."""
        words = np.zeros(2 * -(-self._vocab_size // 64), np.int32)
        self.fill_(words[: num_mask_words(self._vocab_size)], ends, may_end)
        return words.view(np.int64)

    def fill_(self, words: np.ndarray, ends: Iterable[int], may_end: bool) -> None:
        """Write the mask of the next token. `ends`: tokens that end the output.

        End tokens are allowed where the grammar may end. With `may_end` False they are forbidden,
        unless no other token is allowed. After an error the mask allows all tokens.
        """
        started = thread_time()
        if not self.error:
            self._call("unsafe_compute_mask_ptr", words.ctypes.data, words.nbytes)
            if not self.error and self._matcher.is_error():
                self._fail(self._matcher.get_error())
        if self.error:
            words[:] = -1
            return
        self._set_ends_(words, tuple(ends), may_end)
        self._watch(thread_time() - started)

    def _set_ends_(self, words: np.ndarray, ends: tuple[int, ...], may_end: bool) -> None:
        if not self._call("is_accepting"):
            return
        for token in self._model_ends:
            words[token >> 5] &= ~_bit(token)
        goes_on = bool(words.any())
        if goes_on and not may_end:
            return
        for token in ends or (() if goes_on else self._model_ends):
            words[token >> 5] |= _bit(token)

    @property
    def _matcher(self) -> Any:
        # Copy on first use: copies for thousands of waiting requests would take gigabytes.
        if self._own is None:
            self._own = self._compiled.deep_copy()
        return self._own

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the matcher. After an exception, set `error` and return None."""
        try:
            return call(getattr(self._matcher, method), *arguments)
        except Exception as error:
            self._fail(f"{type(error).__name__}: {one_line(error)}")
            return None

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
