"""OutputParser: splits one output's text into pieces as it arrives, according to ParseSettings."""

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

HARMONY = "gpt_oss"  # of both tables


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseSettings:
    tool_parser: str | None = None  # one of TOOL_PARSERS; None: calls are not parsed
    is_required: bool = False  # the text is calls; a list in JSON if there is no tool_parser
    named: str | None = None  # it calls this tool; without tool_parser it is the arguments alone
    tools: dict[str, dict[str, Any]] = field(default_factory=dict)  # schemas of the arguments
    is_single: bool = False  # calls after the first are dropped
    reasoning_parser: str | None = None  # one of REASONING_PARSERS
    prompt_end: str = ""  # the prompt's last characters
    num_calls_before: int = 0  # calls in the conversation so far

    @property
    def is_call(self) -> bool:
        """True if the text consists of calls only, apart from reasoning before them."""
        return self.is_required or self.named is not None

    @property
    def reasoning(self) -> ReasoningFormat | None:
        return None if self.reasoning_parser is None else REASONING_PARSERS[self.reasoning_parser]

    @property
    def calls(self) -> ToolFormat | None:
        """Format of calls that the text is searched for; None: all other text is content."""
        if self.tool_parser is not None:
            return TOOL_PARSERS[self.tool_parser]
        if self.is_required:
            return REQUIRED
        is_harmony = self.reasoning is not None and self.reasoning.is_harmony
        return TOOL_PARSERS[HARMONY] if is_harmony and self.named is None else None

    @property
    def is_harmony(self) -> bool:
        """True if one reader finds both reasoning and calls."""
        return self.calls is TOOL_PARSERS[HARMONY]

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts to look for, which must be visible even if they are special tokens."""
        of_calls = self.calls.tokens if self.calls is not None else ()
        of_reasoning = self.reasoning.tokens if self.reasoning is not None else ()
        return tuple(dict.fromkeys((*of_calls, *of_reasoning)))

    @property
    def stops(self) -> tuple[str, ...]:
        """Tokens that end the model's turn in its format."""
        return harmony.STOPS if self.is_harmony else ()

    def reasoning_tokens(self) -> ReasoningTokens | HarmonyTokens | None:
        """Reasoning token counter for one output; None if reasoning is not parsed."""
        if self.reasoning is None:
            return None
        if self.is_harmony:
            return HarmonyTokens(self.new_scanner())
        return ReasoningTokens(self.reasoning, prompt_end=self.prompt_end)

    def new_scanner(self) -> ToolScanner:
        """A scanner of calls for one output."""
        return ToolScanner(self.calls or REQUIRED, self.tools, is_forced=self.is_call)

    def grammar_prefix(self, marker_token: MarkerToken, is_used: Callable[[str], bool]) -> str:
        """Lark of the text before a constrained text; empty if none.

        `marker_token`: returns the id of a marker that is a token which no text matches. `is_used`:
        returns True if the model's chat template writes or reads a marker, as those of reasoning
        models do.
        """
        form = self.reasoning
        if form is None:
            return ""
        thinks = form.is_harmony or is_used(form.start.strip()) or is_used(form.end)
        return grammar_prefix(form, self.prompt_end, marker_token=marker_token, thinks=thinks)

    def answer_opening(self, marker_token: MarkerToken) -> str:
        """Lark of the text before a constrained answer that is no call; empty if none."""
        return "" if self.reasoning is None else answer_opening(self.reasoning, marker_token)


class OutputParser:
    """Call `push` with the text as it arrives, then `finish`; `parse` does both."""

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
        """Pieces that are decided with this text."""
        pieces: list[Piece] = []
        if self._reasoning is not None:
            pieces, text = self._reasoning.push(text)
        return pieces + self._behind(text)

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """The remaining pieces, when no more text arrives.

        `is_cut`: the output ended at its token limit. An incomplete call is then kept as far as it
        was read.
        """
        pieces, text = ([], "") if self._reasoning is None else self._reasoning.finish(is_cut)
        pieces += self._behind(text)
        if self._answer is not None:
            pieces += self._content(self._answer.finish())
        return pieces + (self._kept(self._tools.finish(is_cut)) if self._tools is not None else [])

    def parse(self, text: str, *, is_cut: bool = False) -> list[Piece]:
        """The pieces of a complete text, merged."""
        return merged((*self.push(text), *self.finish(is_cut=is_cut)))

    def _behind(self, text: str) -> list[Piece]:
        """Pieces of text after the reasoning."""
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
    """Merged pieces of a complete text. A broken call is content."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)  # the name and the arguments of each

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
