"""GrammarCompiler: makes constraints of grammars, in threads. Knows no request.

The library lets go of the interpreter's lock while it compiles, so steps go on meanwhile.
"""

from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from formats.errors import InputError, one_line
from qserve.load_tokenizer import load_tokenizer
from qserve.structured.backend import library, limits
from qserve.structured.constraint import Constraint, num_mask_words
from qserve.structured.grammar import grammar_text, refusal
from qserve.structured.params import FIELD, StructuredOutputsParams

NUM_THREADS = 2
MAX_CACHED = 128  # grammars
MAX_CACHED_CHARS = 8 * 2**20  # of their texts
MAX_QUEUED = 256  # grammars that are being compiled or wait for it
# Of the first mask, which a few regular expressions make the whole cost.
MAX_FIRST_MASK_SECONDS = 1.0


class GrammarCompiler:
    """Compiles for one model's vocabulary; keeps the grammars that were used last."""

    def __init__(self, folder: str, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """Takes no time: the vocabulary is read for the first grammar."""
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._threads = ThreadPoolExecutor(NUM_THREADS, "grammars")
        self._tokenizer: Future | None = None
        self._compiled: OrderedDict[str, Future] = OrderedDict()  # by text, the last used last
        self._num_chars = 0

    def submit(self, params: StructuredOutputsParams) -> Future:
        """Start to compile. The result is for `constraint`; raises InputError, as this does."""
        text = grammar_text(params)
        library()  # says at once where it is not installed
        known = self._compiled.pop(text, None)
        # One that failed is tried again: the reason may have been the time that it took.
        if known is not None and not (known.done() and known.exception()):
            self._compiled[text] = known
            return known
        if known is not None:
            self._num_chars -= len(text)
        if sum(not future.done() for future in self._compiled.values()) >= MAX_QUEUED:
            raise InputError(FIELD, "too many grammars are being compiled", "try again later")
        if self._tokenizer is None or (self._tokenizer.done() and self._tokenizer.exception()):
            self._tokenizer = self._threads.submit(self._read_tokenizer)
        future = self._threads.submit(self._compile, self._tokenizer, text, params)
        self._compiled[text] = future
        self._num_chars += len(text)
        self._forget()
        return future

    def constraint(self, compiled: Any) -> Constraint:
        """A new constraint at its beginning."""
        return Constraint(compiled.deep_copy(), self._vocab_size, self._eos_token_ids)

    def _forget(self) -> None:
        """Drop what was used longest ago; a copy that is in use lives on."""
        while len(self._compiled) > MAX_CACHED or self._num_chars > MAX_CACHED_CHARS:
            text = next((text for text, future in self._compiled.items() if future.done()), None)
            if text is None:
                return
            del self._compiled[text]
            self._num_chars -= len(text)

    def _read_tokenizer(self) -> Any:
        try:
            return library().LLTokenizer(
                _tokenizer_text(self._folder),
                n_vocab=self._vocab_size,
                eos_token=self._eos_token_ids or None,
            )
        except InputError:
            raise
        except Exception as error:  # from Rust, of any kind
            raise InputError(
                FIELD, f"the model's tokenizer cannot be used: {one_line(error)}"
            ) from error

    def _compile(self, tokenizer: Future, text: str, params: StructuredOutputsParams) -> Any:
        matcher = library().LLMatcher(tokenizer.result(), text, limits=limits(), log_level=0)
        if not matcher.is_error():
            # Copies begin with what this mask finds out.
            words = np.empty(num_mask_words(self._vocab_size), np.int32)
            started = perf_counter()
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if perf_counter() - started > MAX_FIRST_MASK_SECONDS:
                raise refusal(params, "it is too complex")
        if matcher.is_error():
            raise refusal(params, matcher.get_error())
        return matcher


def _tokenizer_text(folder: str) -> str:
    """The model's tokenizer as the library tokenizers writes it."""
    path = Path(folder) / "tokenizer.json"
    if path.exists():
        return path.read_text(encoding="utf-8")
    backend = getattr(load_tokenizer(folder), "backend_tokenizer", None)
    if backend is None:
        raise InputError(FIELD, "the model's tokenizer is none of the library tokenizers")
    return backend.to_str()
