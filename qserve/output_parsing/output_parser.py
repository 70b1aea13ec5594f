"""OutputParser: splits the text of one output into pieces as it arrives, by ParseSettings."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from qserve.output_parsing.grammars.markers import MarkerToken
from qserve.output_parsing.grammars.reasoning_grammar import answer_opening, grammar_prefix
from qserve.output_parsing.notations import harmony
from qserve.output_parsing.pieces import BROKEN, CONTENT, NAME, REASONING, Piece, merged
from qserve.output_parsing.reasoning import (
    AnswerText,
    HarmonyTokens,
    ReasoningScanner,
    ReasoningTokens,
)
from qserve.output_parsing.reasoning_formats import REASONING_PARSERS, ReasoningFormat
from qserve.output_parsing.tool_format import ToolFormat
from qserve.output_parsing.tool_formats import REQUIRED, TOOL_PARSERS
from qserve.output_parsing.tool_scanner import NamedCall, ToolScanner

HARMONY = "gpt_oss"  # Harmony's name in TOOL_PARSERS and REASONING_PARSERS


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseSettings:
    tool_parser: str | None = None  # key of TOOL_PARSERS; None: the model's format is not parsed
    is_required: bool = False  # the text is only calls; a JSON list if there is no tool_parser
    named: str | None = None  # the text calls this tool; without tool_parser it is the arguments
    tools: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> schema of arguments
    is_single: bool = False  # True: drop calls after the first
    reasoning_parser: str | None = None  # key of REASONING_PARSERS; None: reasoning is content
    prompt_end: str = ""  # last characters of the prompt
    num_calls_before: int = 0  # number of calls in the conversation so far

    @property
    def is_call(self) -> bool:
        """True if the text after the reasoning is only calls."""
        return self.is_required or self.named is not None

    @property
    def reasoning(self) -> ReasoningFormat | None:
        return None if self.reasoning_parser is None else REASONING_PARSERS[self.reasoning_parser]

    @property
    def calls(self) -> ToolFormat | None:
        """Format of the calls to look for; None: all text except reasoning is content."""
        if self.tool_parser is not None:
            return TOOL_PARSERS[self.tool_parser]
        if self.is_required:
            return REQUIRED
        is_harmony = self.reasoning is not None and self.reasoning.is_harmony
        return TOOL_PARSERS[HARMONY] if is_harmony and self.named is None else None

    @property
    def is_harmony(self) -> bool:
        """True for Harmony, where one reader finds both reasoning and calls."""
        return self.calls is TOOL_PARSERS[HARMONY]

    @property
    def markers(self) -> tuple[str, ...]:
        """Markers to look for. The text must include them even if they are special tokens."""
        of_calls = self.calls.tokens if self.calls is not None else ()
        of_reasoning = self.reasoning.tokens if self.reasoning is not None else ()
        return tuple(dict.fromkeys((*of_calls, *of_reasoning)))

    @property
    def stops(self) -> tuple[str, ...]:
        """Names of tokens that end the model's turn in this format."""
        return harmony.STOPS if self.is_harmony else ()

    def reasoning_tokens(self) -> ReasoningTokens | HarmonyTokens | None:
        """Return a counter of reasoning tokens for one output; None if reasoning is not parsed."""
        if self.reasoning is None:
            return None
        if self.is_harmony:
            return HarmonyTokens(self.new_scanner())
        return ReasoningTokens(self.reasoning, prompt_end=self.prompt_end)

    def new_scanner(self) -> ToolScanner:
        """Return a scanner of calls for one output."""
        return ToolScanner(self.calls or REQUIRED, self.tools, is_forced=self.is_call)

    def grammar_prefix(self, marker_token: MarkerToken, is_used: Callable[[str], bool]) -> str:
        """Return a Lark grammar of the reasoning before a constrained text; "" without reasoning.

        marker_token: see Tokenizer.marker_token
        is_used: returns True if a marker occurs in the chat template, as in reasoning models
        """
        form = self.reasoning
        if form is None:
            return ""
        thinks = form.is_harmony or is_used(form.start.strip()) or is_used(form.end)
        return grammar_prefix(form, self.prompt_end, marker_token=marker_token, thinks=thinks)

    def answer_opening(self, marker_token: MarkerToken) -> str:
        """Return a Lark grammar of the text between reasoning and answer; "" if there is none."""
        return "" if self.reasoning is None else answer_opening(self.reasoning, marker_token)


class OutputParser:
    """Parser of one output: call `push` with text as it arrives, then `finish`; or only `parse`."""

    def __init__(self, settings: ParseSettings) -> None:
        self._is_single = settings.is_single
        self._reasoning = self._answer = None
        self._tools: ToolScanner | NamedCall | None = None
        calls, form = settings.calls, settings.reasoning
        if calls is not None:
            self._tools = settings.new_scanner()
        elif settings.named is not None:
            self._tools = NamedCall(settings.named)
        if form is None or settings.is_harmony:
            return
        if calls is None or settings.is_call:
            self._reasoning = ReasoningScanner(form, prompt_end=settings.prompt_end)
        else:
            self._reasoning = ReasoningScanner(
                form,
                prompt_end=settings.prompt_end,
                call_markers=calls.markers,
                new_scanner=settings.new_scanner,
            )
        if form.answer[0]:
            self._answer = AnswerText(*form.answer)

    def push(self, text: str) -> list[Piece]:
        """Add text. Returns the pieces that are now known."""
        pieces: list[Piece] = []
        if self._reasoning is not None:
            pieces, text = self._reasoning.push(text)
        return pieces + self._behind(text)

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Return the remaining pieces, after the last text.

        `is_cut`: the output ended at its token limit. Then an incomplete call is kept as a call.
        """
        pieces, text = ([], "") if self._reasoning is None else self._reasoning.finish(is_cut)
        pieces += self._behind(text)
        if self._answer is not None:
            pieces += self._content(self._answer.finish())
        return pieces + (self._kept(self._tools.finish(is_cut)) if self._tools is not None else [])

    def parse(self, text: str, *, is_cut: bool = False) -> list[Piece]:
        """Return the pieces of a complete text. Adjacent pieces of the same kind are merged."""
        return merged((*self.push(text), *self.finish(is_cut=is_cut)))

    def _behind(self, text: str) -> list[Piece]:
        """Return the pieces of text after the reasoning."""
        return self._content(text if self._answer is None else self._answer.push(text))

    def _content(self, text: str) -> list[Piece]:
        if not text:
            return []
        if self._tools is None:
            return [Piece(CONTENT, text)]
        return self._kept(self._tools.push(text))

    def _kept(self, pieces: list[Piece]) -> list[Piece]:
        if not self._is_single:
            return pieces
        return [piece for piece in pieces if piece.call == 0]


@dataclass(slots=True, kw_only=True)
class Message:
    """A complete text as reasoning, content and calls. A broken call is content."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)  # [name, JSON of the arguments] per call

    @classmethod
    def of(cls, pieces: list[Piece]) -> "Message":
        found = cls()
        for kind, text, _ in pieces:
            if kind == REASONING:
                found.reasoning += text
            elif kind == CONTENT:
                found.content += text
            elif kind == NAME:
                found.calls.append([text, ""])
            elif kind != BROKEN:
                found.calls[-1][1] += text
            else:
                found.calls.pop()
                found.content += text
        return found
