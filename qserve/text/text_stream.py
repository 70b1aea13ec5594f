"""Streamed text of a request: incremental detokenization and stop strings."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from qserve.engine.token_event import Hypothesis, TokenEvent
from qserve.params.sampling_params import SamplingParams
from qserve.text.tokenizer import REPLACEMENT, Tokenizer

# tokens; a character has at most 4 bytes, so this is twice what can still become one
MAX_PENDING = 8
NUM_CONTEXT = 12  # number of prompt tokens that the first output tokens are decoded with


class IncrementalDetokenizer:
    """Text of a growing token sequence, emitted as soon as later tokens cannot change it.

    The text of a token depends on its neighbours: a character may span several tokens, and a
    leading space may be dropped. A window of tokens is therefore decoded, from a boundary between
    whole characters to the end. The part of its text that was not emitted before is new. The window
    is a few tokens long, regardless of the output's length.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        prompt = [token for token in prompt_token_ids[-NUM_CONTEXT:] if token not in self._skipped]
        self._window, self._num_whole = self._whole_context(prompt)
        # Part of a character at the prompt's end becomes text with the output's first bytes.
        self._text = self._decode(self._window[: self._num_whole])
        self._num_shown = len(self._text)

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens; return the text that became final."""
        return "".join([self._push(token) for token in token_ids if token not in self._skipped])

    def flush(self) -> str:
        """Return the text held back so far. Called when no more tokens come."""
        text = self._text[self._num_shown :]
        self._num_shown = len(self._text)
        return text

    def _push(self, token: int) -> str:
        self._window.append(token)
        self._text = self._decode(self._window)
        num_pending = len(self._window) - self._num_whole
        num_held = len(self._text) - len(self._text.rstrip(REPLACEMENT))
        if num_pending > MAX_PENDING:
            # These bytes never became text; the last 3 may still begin a character.
            num_held = min(num_held, 3)
        end = len(self._text) - num_held
        new = self._text[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        if new and not num_held:
            self._move_window(self._num_whole)
            self._num_whole = len(self._window)
        elif num_pending > MAX_PENDING:
            self._move_window(len(self._window) - MAX_PENDING // 2)
            self._num_whole = 0
        return new

    def _move_window(self, start: int) -> None:
        num_unshown = len(self._text) - self._num_shown
        self._window = self._window[start:]
        self._text = self._decode(self._window)
        self._num_shown = len(self._text) - num_unshown

    def _whole_context(self, prompt: list[int]) -> tuple[list[int], int]:
        """Return the longest tail of the prompt that starts with a whole character.

        The second value counts the tail's tokens before a partial character at its end.
        """
        for end in range(len(prompt), max(len(prompt) - 4, 0), -1):
            for start in range(end):
                text = self._decode(prompt[start:end])
                if text and REPLACEMENT not in text:
                    return prompt[start:], end - start
        return (prompt, 0) if len(prompt) < 4 else ([], 0)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """Text that one event adds to an output.

    A stop string cuts the event's tokens after those that complete it, and ends it.
    """

    event: TokenEvent  # with log probabilities of visible tokens, or of all if requested
    text: str
    stop_reason: str | int | None = None  # the stop string or stop token that ended the output
    beam: Hypothesis | None = None  # the output of a beam search is one of these

    @property
    def finish_reason(self) -> str | None:
        """Reason if it ended the output: "stop", "length" or "error"."""
        return self.event.finish_reason


class TextStream:
    """Visible text of one request: detokenized, and cut at the first stop string.

    Text that may be the start of a stop string is held back until this is decided. If several stop
    strings occur, the one that is complete first ends the text, however the text was split into
    tokens. After a stop string `finished` is true, but the engine still runs: the caller aborts the
    request.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
        *,
        all_logprobs: bool = False,
    ) -> None:
        """`all_logprobs`: keep those of an end token that is not shown."""
        self._all_logprobs = all_logprobs
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_token_ids, params.skip_special_tokens
        )
        self._params = params
        self._held = ""  # not emitted: may begin a stop string
        self._num_free = 0  # leading characters of _held that came before min_tokens
        self._num_tokens = 0
        self.finished = False

    def push(self, event: TokenEvent) -> TextDelta:
        """Process an engine event; return the text to show for it."""
        if self.finished:
            event = event._replace(token_ids=(), logprobs=(), finish_reason=None)
            return TextDelta(event=event, text="")
        hidden = event.ended_by_token and not self._params.include_stop_str_in_output
        num_visible = len(event.token_ids) - 1 if hidden else len(event.token_ids)
        shown = []
        for index, token in enumerate(event.token_ids[:num_visible]):
            self._num_tokens += 1
            text, stop = self._take(self._detokenizer.push((token,)))
            shown.append(text)
            if stop is not None:
                return self._end_at(stop, shown, event, index + 1)
        if len(event.logprobs) > num_visible and not self._all_logprobs:
            event = event._replace(logprobs=event.logprobs[:num_visible])
        if event.finish_reason is None:
            return TextDelta(event=event, text="".join(shown))
        rest = self._detokenizer.flush()
        if event.finish_reason == "error":
            self._held += rest  # no stop string ends a failed output
        else:
            text, stop = self._take(rest)
            shown.append(text)
            if stop is not None:
                return self._end_at(stop, shown, event, len(event.token_ids))
        shown.append(self._held)
        self.finished = True
        return TextDelta(event=event, text="".join(shown), stop_reason=event.stop_token)

    def _end_at(self, stop: str, shown: list[str], event: TokenEvent, count: int) -> TextDelta:
        """Return the last delta, with the first `count` tokens of the event."""
        self.finished = True
        event = event._replace(
            token_ids=event.token_ids[:count],
            logprobs=event.logprobs[:count],
            finish_reason="stop",
        )
        return TextDelta(event=event, text="".join(shown), stop_reason=stop)

    def _take(self, new: str) -> tuple[str, str | None]:
        """Add text; return the text to show, and the stop string that was completed."""
        if not self._params.stop:
            return new, None
        self._held += new
        if self._num_tokens < self._params.min_tokens:
            self._num_free = len(self._held)
        elif new and (found := self._first_stop()) is not None:
            end, stop = found
            if not self._params.include_stop_str_in_output:
                end -= len(stop)
            return self._held[:end], stop
        start = self._start_of_partial_stop()
        text, self._held = self._held[:start], self._held[start:]
        self._num_free = max(0, self._num_free - start)
        return text, None

    def _first_stop(self) -> tuple[int, str] | None:
        """End and text of the stop string that ends first in the held text; ties: the longest."""
        found = []
        for stop in self._params.stop:
            start = self._held.find(stop, max(0, self._num_free - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), stop))
        return min(found, key=lambda pair: (pair[0], -len(pair[1])), default=None)

    def _start_of_partial_stop(self) -> int:
        """Start of the longest tail of the held text that is a prefix of a stop string."""
        longest = max(map(len, self._params.stop)) - 1
        for start in range(max(0, len(self._held) - longest), len(self._held)):
            tail = self._held[start:]
            if any(stop.startswith(tail) for stop in self._params.stop):
                return start
        return len(self._held)
