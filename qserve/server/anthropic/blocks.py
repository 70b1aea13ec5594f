"""Builds the content blocks of an Anthropic reply, and their stream events, from parsed output.

Clients rely on two properties: block indices count from 0 without gaps, and one block is open at a
time.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from qserve.output_parsing.output_parser import ParseSettings
from qserve.output_parsing.pieces import ARGUMENTS, BROKEN, CONTENT, NAME, Piece
from qserve.server.openai.chat_message import new_call_id

TEXT, THINKING, TOOL_USE = "text", "thinking", "tool_use"
# Clients drop reasoning without a signature. This server verifies none.
SIGNATURE = "unsigned"


@dataclass(slots=True, kw_only=True)
class ContentBlocks:
    """Content blocks of one reply: call `take` with each piece, then `end`."""

    parsing: ParseSettings | None  # determines the form of tool call ids
    omits_thinking: bool = False  # True: thinking blocks have no text
    revokes: bool = False  # True: a broken call becomes text; False for streams, which sent it
    done: list[dict[str, Any]] = field(default_factory=list)
    num_calls: int = 0  # complete calls
    _open: dict[str, Any] | None = None
    _space: str = ""  # held-back white space: dropped unless text follows
    _arguments: str = ""  # arguments of the open call

    def take(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """Yield the events of a piece."""
        kind, text, _ = piece
        if kind == NAME:
            call_id = new_call_id(self.parsing).replace("call_", "toolu_", 1)
            yield from self._begin({"type": TOOL_USE, "id": call_id, "name": text, "input": {}})
            self._arguments = ""
        elif kind == ARGUMENTS:
            self._arguments += text
            yield self._delta("input_json_delta", partial_json=text)
        elif kind == BROKEN:
            yield from self._close()
            self.num_calls -= 1
            if self.revokes:
                self.done.pop()
                yield from self._text(text)
        elif kind == CONTENT:
            yield from self._text(text)
        else:
            if self._kind != THINKING:
                yield from self._begin({"type": THINKING, "thinking": "", "signature": ""})
            if not self.omits_thinking:
                self._open["thinking"] += text
                yield self._delta("thinking_delta", thinking=text)

    def end(self) -> Iterator[dict[str, Any]]:
        """Yield the events after the last piece. A reply without text and calls gets empty text."""
        yield from self._close()
        if all(block["type"] == THINKING for block in self.done):
            yield from self._begin({"type": TEXT, "text": ""})
            yield from self._close()

    @property
    def _kind(self) -> str | None:
        return None if self._open is None else self._open["type"]

    def _text(self, text: str) -> Iterator[dict[str, Any]]:
        if self._kind != TEXT:
            # Models write line breaks between calls and after reasoning: not a text block.
            self._space += text
            if not self._space.strip():
                return
            text = self._space
            yield from self._begin({"type": TEXT, "text": ""})
        self._open["text"] += text
        yield self._delta("text_delta", text=text)

    def _begin(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self._open, self._space = block, ""
        yield {
            "type": "content_block_start",
            "index": len(self.done),
            "content_block": dict(block),
        }

    def _close(self) -> Iterator[dict[str, Any]]:
        block, self._open, self._space = self._open, None, ""
        if block is None:
            return
        if block["type"] == THINKING:
            block["signature"] = SIGNATURE
            yield self._delta("signature_delta", signature=SIGNATURE)
        elif block["type"] == TOOL_USE:
            self.num_calls += 1
            if not self._arguments:
                yield self._delta("input_json_delta", partial_json="{}")
            block["input"] = _object(self._arguments)
        yield {"type": "content_block_stop", "index": len(self.done)}
        self.done.append(block)

    def _delta(self, kind: str, **fields: str) -> dict[str, Any]:
        delta = {"type": kind, **fields}
        return {"type": "content_block_delta", "index": len(self.done), "delta": delta}


def _object(arguments: str) -> dict[str, Any]:
    """Parse a call's arguments. If the token limit cut them, return the complete values."""
    try:
        found = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        try:
            found = from_json(arguments, allow_partial=True)
        except ValueError:
            found = {}
    return found if isinstance(found, dict) else {}
