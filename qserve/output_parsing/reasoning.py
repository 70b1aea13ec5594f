"""ReasoningScanner: separates reasoning from the text after it, while the text arrives."""

from collections.abc import Callable

from qserve.output_parsing.marker_search import first_marker, num_held
from qserve.output_parsing.pieces import BROKEN, CONTENT, REASONING, Piece
from qserve.output_parsing.reasoning_formats import CLOSED, OPEN, ReasoningFormat
from qserve.output_parsing.tool_scanner import ToolScanner

MAX_SPACE = 64  # characters of white space before reasoning; longer runs are not held back
MAX_TRIALS = 16  # how often one output's reasoning is searched for a call


class ReasoningScanner:
    """Scanner of one output. White space around the reasoning is dropped.

    If the output ends after a call within the reasoning, it counts as a call: the model omitted the
    end of its reasoning.
    """

    def __init__(
        self,
        form: ReasoningFormat,
        *,
        prompt_end: str,
        call_markers: tuple[str, ...] = (),
        new_scanner: Callable[[], ToolScanner] | None = None,
    ) -> None:
        """Start a scanner.

        prompt_end: last characters of the prompt, which may start or end reasoning
        call_markers: texts that start tool calls
        new_scanner: returns a scanner of calls
        """
        state, self._ends = form.opened(prompt_end)
        self._form = form
        self._call_markers, self._new_scanner = call_markers, new_scanner
        self._held = ""  # text that may start a marker
        self._spaces: list[str] = []  # white space that is dropped unless reasoning follows
        self._has_begun = False  # True once some reasoning was emitted
        self._is_open = state == OPEN
        # True until the first characters decide whether the output starts with reasoning.
        self._may_begin = state != CLOSED
        self._is_behind = not self._may_begin  # True after reasoning: drop leading white space
        self._trial: ToolScanner | None = None  # reads a possible call in the reasoning
        self._tried: list[str] = []  # text of the possible call
        self._tried_marker = ""
        self._num_trials = 0

    @property
    def is_open(self) -> bool:
        """True inside reasoning."""
        return self._is_open

    @property
    def may_begin(self) -> bool:
        """True while it is undecided whether the output starts with reasoning."""
        return self._may_begin and not self._is_open

    def push(self, text: str) -> tuple[list[Piece], str]:
        """Add text. Returns the pieces of reasoning and the other text that are now known."""
        reasoning: list[str] = []
        rest = self._push(text, reasoning)
        return _pieces(reasoning), self._behind(rest)

    def finish(self, is_cut: bool = False) -> tuple[list[Piece], str]:
        """Return remaining reasoning and other text. `is_cut`: the output hit the token limit."""
        reasoning: list[str] = []
        rest = ""
        while self._trial is not None:
            has_text = any(map(_is_text, self._trial.finish(is_cut)))
            if self._trial.num_calls and not has_text:
                return _pieces(reasoning), "".join(self._tried)
            rest += self._push(self._no_call(reasoning), reasoning)
        held, self._held = self._held, ""
        if not self._is_open:
            return _pieces(reasoning), self._behind(rest + held)
        text = "".join((*self._spaces, held))
        if text.strip():
            reasoning.append(text if self._has_begun else text.lstrip())
        return _pieces(reasoning), ""

    def _push(self, text: str, reasoning: list[str]) -> str:
        """Process text. Returns the text after the reasoning."""
        while text:
            if self._trial is not None:
                text = self._try(text, reasoning)
            elif self._may_begin:
                text = self._begin(text)
                if not self._may_begin and not self._is_open:
                    return text
            elif self._is_open:
                text = self._read(text, reasoning)
            else:
                return text
        return ""

    def _begin(self, text: str) -> str:
        """Look for the start of reasoning. Returns the text to continue with."""
        self._held += text
        found = self._held.lstrip()
        if len(self._held) - len(found) <= MAX_SPACE:
            for start, ends in self._form.starts.items():
                if found.startswith(start):
                    self._held, self._may_begin, self._is_open = "", False, True
                    self._ends = ends
                    return found[len(start) :]
            if any(start.startswith(found) for start in self._form.starts):
                return ""
        self._may_begin = False
        text, self._held = self._held, ""
        return text

    def _read(self, text: str, reasoning: list[str]) -> str:
        """Read reasoning. Returns the text after its end, or from a possible call on."""
        is_tried = self._new_scanner is not None and self._num_trials < MAX_TRIALS
        markers = (*self._ends, *(self._call_markers if is_tried else ()))
        text = self._held + text
        found = first_marker(text, markers)
        if found is None:
            end = len(text) - num_held(text, markers)
            self._reason(text[:end], reasoning)
            self._held = text[end:]
            return ""
        at, marker = found
        self._held = ""
        self._reason(text[:at], reasoning)
        if marker in self._ends:
            self._is_open, self._is_behind = False, True
            return text[at + len(marker) :]
        if self._form.ends_at_call:
            self._is_open, self._is_behind = False, True
            return text[at:]
        self._trial = self._new_scanner()
        self._num_trials += 1
        self._tried, self._tried_marker = [], marker
        return text[at:]

    def _try(self, text: str, reasoning: list[str]) -> str:
        """Read a possible call. Returns the text to read again if it is not a call."""
        self._tried.append(text)
        if any(map(_is_text, self._trial.push(text))):
            return self._no_call(reasoning)
        return ""

    def _no_call(self, reasoning: list[str]) -> str:
        """Treat the marker of a possible call as reasoning. Returns the text after the marker."""
        text = "".join(self._tried)
        self._trial, self._tried = None, []
        self._reason(self._tried_marker, reasoning)
        return text[len(self._tried_marker) :]

    def _reason(self, text: str, reasoning: list[str]) -> None:
        shown = text.rstrip()
        if shown:
            reasoning.append("".join((*self._spaces, shown)) if self._has_begun else shown.lstrip())
            self._has_begun, self._spaces = True, []
        if self._has_begun and len(shown) < len(text):
            self._spaces.append(text[len(shown) :])

    def _behind(self, text: str) -> str:
        if self._is_behind:
            text = text.lstrip()
            self._is_behind = not text
        return text


class AnswerText:
    """Drops the markers around an answer, and one line break after the first, before the last."""

    def __init__(self, start: str, end: str) -> None:
        self._start, self._end = start, end
        self._held = ""
        self._is_inside, self._is_done = False, False
        self._drops_line_break = False

    def push(self, text: str) -> str:
        """Add text. Returns the answer's text that is now known."""
        if not self._is_inside and not self._is_done:
            self._held += text
            begun = self._held.lstrip()
            num_spaces = len(self._held) - len(begun)
            if num_spaces > MAX_SPACE or not begun.startswith(self._start):
                if num_spaces <= MAX_SPACE and self._start.startswith(begun):
                    return ""
                self._is_done = True
                text, self._held = self._held, ""
                return text
            text, self._held = begun[len(self._start) :], ""
            self._is_inside = self._drops_line_break = True
        if self._is_done or not text:
            return text
        if self._drops_line_break:
            text, self._drops_line_break = text.removeprefix("\n"), False
        text, self._held = self._held + text, ""
        markers = (f"\n{self._end}", self._end)
        found = first_marker(text, markers)
        if found is None:
            end = len(text) - num_held(text, markers)
            self._held = text[end:]
            return text[:end]
        at, marker = found
        self._is_inside, self._is_done = False, True
        return text[:at] + text[at + len(marker) :]

    def finish(self) -> str:
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return held


class ReasoningTokens:
    """Counts the reasoning tokens of an output, including markers, while the text arrives."""

    def __init__(self, form: ReasoningFormat, *, prompt_end: str) -> None:
        self._scanner = ReasoningScanner(form, prompt_end=prompt_end)
        self._num_waiting = 0  # tokens that may be reasoning; undecided
        self.count = 0

    def add(self, text: str, num_tokens: int) -> None:
        """Add text with the number of its tokens."""
        was_open = self._scanner.is_open
        if not was_open and not self._scanner.may_begin:
            return
        self._num_waiting += num_tokens
        reasoning, _ = self._scanner.push(text)
        if was_open or self._scanner.is_open or reasoning:
            self.count, self._num_waiting = self.count + self._num_waiting, 0


class HarmonyTokens:
    """Counts the tokens of Harmony's channel `analysis`, while the text arrives."""

    def __init__(self, scanner: ToolScanner) -> None:
        self._scanner = scanner
        self.count = 0

    def add(self, text: str, num_tokens: int) -> None:
        """Add text with the number of its tokens."""
        if any(piece.kind == REASONING for piece in self._scanner.push(text)):
            self.count += num_tokens


def _is_text(piece: Piece) -> bool:
    return piece.kind in (CONTENT, BROKEN)


def _pieces(reasoning: list[str]) -> list[Piece]:
    text = "".join(reasoning)
    return [Piece(REASONING, text)] if text else []
