"""OutputParser: the pieces of one output, as its text comes. ParseSettings says what to look for.

Knows no tokens and no HTTP.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from qserve.output_parsing import json_calls, pythonic, qwen3_coder
from qserve.output_parsing.pieces import BROKEN, CONTENT, NAME, REASONING, Piece, merged
from qserve.output_parsing.reasoning import (
    REASONING_PARSERS,
    ReasoningScanner,
    ReasoningTokens,
    grammar_prefix,
)
from qserve.output_parsing.tool_scanner import NamedCall, ToolFormat, ToolScanner

# by the name that --tool-call-parser takes
TOOL_PARSERS = {
    "hermes": ToolFormat(read=json_calls.hermes, markers=(json_calls.HERMES,)),
    "llama3_json": ToolFormat(
        read=json_calls.llama3_json, markers=(json_calls.PYTHON_TAG,), starts=("{",)
    ),
    "mistral": ToolFormat(read=json_calls.mistral, markers=(json_calls.MISTRAL,)),
    "pythonic": ToolFormat(read=pythonic.pythonic, markers=(pythonic.START,), starts=("[",)),
    "qwen3_coder": ToolFormat(
        read=qwen3_coder.qwen3_coder, markers=(qwen3_coder.CALL, qwen3_coder.FUNCTION)
    ),
}
# What a grammar makes any model write where calls are required.
REQUIRED = ToolFormat(read=json_calls.call_list, starts=("[",), is_forced=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseSettings:
    tool_parser: str | None = None  # one of TOOL_PARSERS; None: calls are not looked for
    is_required: bool = False  # the text is a list of calls, whatever the parser
    named: str | None = None  # the text is the arguments of this tool
    tools: dict[str, dict[str, Any]] = field(default_factory=dict)  # schemas of the arguments
    is_single: bool = False  # calls beyond the first are dropped
    reasoning_parser: str | None = None  # one of REASONING_PARSERS
    prompt_end: str = ""  # the prompt's last characters

    @property
    def is_call(self) -> bool:
        """Whether the text is calls and nothing else, but for reasoning before them."""
        return self.is_required or self.named is not None

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts to look for, which have to be seen even if they are special tokens."""
        markers: tuple[str, ...] = ()
        if self.tool_parser is not None:
            markers = TOOL_PARSERS[self.tool_parser].markers
        if self.reasoning_parser is not None:
            form = REASONING_PARSERS[self.reasoning_parser]
            markers = (*markers, form.start, form.end)
        return markers

    def reasoning_tokens(self) -> ReasoningTokens | None:
        """A counter for one output; None: reasoning is not looked for."""
        if self.reasoning_parser is None:
            return None
        form = REASONING_PARSERS[self.reasoning_parser]
        return ReasoningTokens(form, prompt_end=self.prompt_end)

    def grammar_prefix(
        self, is_special: Callable[[str], bool], is_used: Callable[[str], bool]
    ) -> str:
        """Lark of what may come before a text that a grammar holds to a form; empty: nothing.

        `is_special`: whether a marker is a special token; `is_used`: whether the model's chat
        template writes or reads it, as those of models that reason do.
        """
        if self.reasoning_parser is None:
            return ""
        form = REASONING_PARSERS[self.reasoning_parser]
        return grammar_prefix(
            form,
            self.prompt_end,
            are_special=is_special(form.end),
            thinks=is_used(form.start) or is_used(form.end),
        )


class OutputParser:
    """`push` the text as it comes, then `finish`; `parse` does both."""

    def __init__(self, settings: ParseSettings) -> None:
        self._is_single = settings.is_single
        self._reasoning = self._tools = None
        if settings.reasoning_parser is not None:
            form = REASONING_PARSERS[settings.reasoning_parser]
            self._reasoning = ReasoningScanner(form, prompt_end=settings.prompt_end)
        if settings.named is not None:
            self._tools = NamedCall(settings.named)
        elif settings.is_required:
            self._tools = ToolScanner(REQUIRED, settings.tools)
        elif settings.tool_parser is not None:
            self._tools = ToolScanner(TOOL_PARSERS[settings.tool_parser], settings.tools)

    def push(self, text: str) -> list[Piece]:
        """What is known with this text."""
        pieces: list[Piece] = []
        if self._reasoning is not None:
            pieces, text = self._reasoning.push(text)
        return pieces + self._behind(text)

    def finish(self) -> list[Piece]:
        """The rest, when no more text comes."""
        pieces, text = ([], "") if self._reasoning is None else self._reasoning.finish()
        pieces += self._behind(text)
        return pieces + (self._kept(self._tools.finish()) if self._tools is not None else [])

    def parse(self, text: str) -> list[Piece]:
        """The pieces of a whole text, each as long as it is."""
        return merged((*self.push(text), *self.finish()))

    def _behind(self, text: str) -> list[Piece]:
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
    """The pieces of a whole text, put together. A broken call is content."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)  # the name and the arguments of each

    @classmethod
    def of(cls, pieces: list[Piece], *, is_cut: bool = False) -> "Message":
        """`is_cut`: the output ended at its limit, and a call with it."""
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
            elif not is_cut:
                found.calls.pop()
                found.content += text
        return found
