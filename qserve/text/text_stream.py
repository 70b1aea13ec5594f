"""Incremental detokenization of a request's output, and stop strings."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from qserve.engine.token_event import Hypothesis, TokenEvent
from qserve.params.sampling_params import SamplingParams
from qserve.text.tokenizer import REPLACEMENT, Tokenizer

# Tokens without text after which their bytes are given up. A character has at most 4 bytes, so this
# is twice the largest number of tokens that can become one.
MAX_PENDING = 8
NUM_CONTEXT = 12  # prompt tokens that are decoded together with the first output tokens


class IncrementalDetokenizer:
    """Detokenizes a growing token sequence; emits text once later tokens cannot change it.

    The text of a token depends on its neighbours: a character may span several tokens, and a
    leading space may be dropped. So a window of the last few tokens is decoded. It starts at a
    boundary between characters, and its text that was not emitted before is new.
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
        # If the prompt ends within a character, the output's first bytes complete the character.
        self._text = self._decode(self._window[: self._num_whole])
        self._num_shown = len(self._text)

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens. Returns the text that is now final."""
        return "".join([self._push(token) for token in token_ids if token not in self._skipped])

    def flush(self) -> str:
        """Return the text that was held back. Call it after the last token."""
        text = self._text[self._num_shown :]
        self._num_shown = len(self._text)
        return text

    def _push(self, token: int) -> str:
        self._window.append(token)
        self._text = self._decode(self._window)
        num_pending = len(self._window) - self._num_whole
        num_held = len(self._text) - len(self._text.rstrip(REPLACEMENT))
        if num_pending > MAX_PENDING:
            # The bytes form no character. Only the last 3 may still begin one.
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
        """Return the longest tail of the prompt that starts at a boundary between characters.

        The second value is the number of the tail's tokens before an incomplete last character.
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

    If a stop string ends the output, the event has only the tokens up to the stop string, and
    finish_reason "stop".
    """

    event: TokenEvent  # has log probabilities of visible tokens only, unless all are requested
    text: str
    stop_reason: str | int | None = None  # the stop string or stop token that ended the output
    beam: Hypothesis | None = None  # the beam, if the output is from a beam search

    @property
    def finish_reason(self) -> str | None:
        """Reason why the output ended: "stop", "length" or "error"; None: it continues."""
        return self.event.finish_reason


class TextStream:
    """Detokenizes the output of one request, and cuts it at the first stop string.

    Text that may start a stop string is held back until this is decided. If several stop strings
    occur, the one that is complete first ends the text, however the text is split into tokens.
    After a stop string `finished` is True, but the engine still runs; the caller must abort the
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
        """`all_logprobs`: keep the log probabilities of an end token that is not shown."""
        self._all_logprobs = all_logprobs
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_token_ids, params.skip_special_tokens
        )
        self._params = params
        self._held = ""  # text that is held back, since it may start a stop string
        self._num_free = 0  # characters of _held from before min_tokens: not searched
        self._num_tokens = 0
        self.finished = False

    def push(self, event: TokenEvent) -> TextDelta:
        """Process an event of the engine. Returns the text to show."""
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
            self._held += rest  # do not search stop strings in a failed output
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
        """Add text. Returns the text to show, and the stop string that it completes, if any."""
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
        """Return end and text of the stop string that ends first; the longest in case of a tie."""
        found = []
        for stop in self._params.stop:
            start = self._held.find(stop, max(0, self._num_free - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), stop))
        return min(found, key=lambda pair: (pair[0], -len(pair[1])), default=None)

    def _start_of_partial_stop(self) -> int:
        """Return the start of the longest tail of the held text that may start a stop string."""
        longest = max(map(len, self._params.stop)) - 1
        for start in range(max(0, len(self._held) - longest), len(self._held)):
            tail = self._held[start:]
            if any(stop.startswith(tail) for stop in self._params.stop):
                return start
        return len(self._held)
