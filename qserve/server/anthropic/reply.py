"""The reply to POST /v1/messages, whole and as a stream of events."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from qserve.output_parsing.output_parser import OutputParser
from qserve.output_parsing.pieces import CONTENT, Piece
from qserve.server.anthropic.blocks import ContentBlocks
from qserve.server.openai.generation import Deltas, Output
from qserve.server.openai.replies import Counts
from qserve.server.requests.job import Job
from qserve.text.text_stream import TextDelta
from qserve.text.tokenizer import Tokenizer

START_SECONDS = 5.0  # a stream starts within this time, even if the prompt is queued or in prefill
PING = {"type": "ping"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageReply:
    """Builds the message object of a reply, and its stream events."""

    job: Job
    model: str
    tokenizer: Tokenizer

    def whole(self, outputs: list[Output]) -> dict[str, Any]:
        """Return the whole reply."""
        (output,) = outputs
        blocks = self._blocks(revokes=True)
        if self._answers:
            for piece in self._pieces(output):
                for _ in blocks.take(piece):
                    pass
            for _ in blocks.end():
                pass
        return self._message(
            blocks.done, self._ending(output, blocks), self._usage(output, with_details=True)
        )

    async def events(self, deltas: Deltas) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of the stream; `type` is the event's name."""
        output, blocks = Output(), self._blocks()
        parser = None if self.job.parsing is None else OutputParser(self.job.parsing)
        has_begun = has_block = False
        async with aclosing(_soon(deltas)) as found:
            async for delta in found:
                if delta is not None:
                    output.add(delta)
                if not has_begun:
                    yield {"type": "message_start", "message": self._start(output)}
                    has_begun = True
                if delta is None:
                    yield PING
                    continue
                for piece in _parsed(parser, delta) if self._answers else ():
                    for event in blocks.take(piece):
                        yield event
                        if not has_block:
                            has_block = True
                            yield PING
        if self._answers:
            for event in blocks.end():
                yield event
        usage = self._usage(output, with_details=True)
        yield {"type": "message_delta", "delta": self._ending(output, blocks), "usage": usage}
        yield {"type": "message_stop"}

    @property
    def _answers(self) -> bool:
        """True unless the request only fills the prefix cache (max_tokens: 0)."""
        return self.job.repeated["max_tokens"] > 0

    def _blocks(self, *, revokes: bool = False) -> ContentBlocks:
        return ContentBlocks(
            parsing=self.job.parsing,
            omits_thinking=self.job.repeated["omits_thinking"],
            revokes=revokes,
        )

    def _pieces(self, output: Output) -> list[Piece]:
        if self.job.parsing is None:
            return [Piece(CONTENT, output.text)]
        is_cut = output.finish_reason == "length"
        return OutputParser(self.job.parsing).parse(output.text, is_cut=is_cut)

    def _start(self, output: Output) -> dict[str, Any]:
        """Return the message as it is before its first content block."""
        ending = {"stop_reason": None, "stop_sequence": None}
        return self._message([], ending, self._usage(output, with_details=False))

    def _message(
        self, content: list[dict], ending: dict[str, Any], usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self.job.request_id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **ending,
            "usage": usage,
        }

    def _ending(self, output: Output, blocks: ContentBlocks) -> dict[str, Any]:
        sequence = output.stop_reason if isinstance(output.stop_reason, str) else None
        if output.finish_reason == "length":
            is_full = len(output.token_ids) < self.job.repeated["max_tokens"]
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif output.finish_reason == "abort":
            reason = "pause_turn"  # asks the client to send the message back, to continue it
        elif sequence is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if blocks.num_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self, output: Output, *, with_details: bool) -> dict[str, Any]:
        """Return token counts. As in Anthropic's API, input_tokens excludes cached tokens."""
        usage: dict[str, Any] = {
            "input_tokens": self.job.num_prompt_tokens - output.facts.num_cached,
            "cache_creation_input_tokens": 0,  # billed by Anthropic; caching is automatic here
            "cache_read_input_tokens": output.facts.num_cached,
            "output_tokens": len(output.token_ids) if self._answers else 0,
        }
        counts = Counts(parsing=self.job.parsing)
        if not with_details:
            return usage
        for text, num_tokens in output.parts:
            counts.add_reasoning(0, text, num_tokens)
        if counts.num_reasoning is not None:
            usage["output_tokens_details"] = {"thinking_tokens": counts.num_reasoning}
        return usage


def _parsed(parser: OutputParser | None, delta: TextDelta) -> list[Piece]:
    """Return the pieces that a delta completes."""
    if parser is None:
        return [Piece(CONTENT, delta.text)] if delta.text else []
    pieces = parser.push(delta.text)
    if delta.finish_reason is not None:
        pieces += parser.finish(is_cut=delta.finish_reason == "length")
    return pieces


async def _soon(deltas: Deltas) -> AsyncGenerator[TextDelta | None, None]:
    """Yield the deltas. Yield None first if no delta arrives within START_SECONDS."""
    first = asyncio.ensure_future(anext(deltas))
    try:
        done, _ = await asyncio.wait({first}, timeout=START_SECONDS)
        if not done:
            yield None
        _, delta = await first
    finally:
        # A generator cannot be closed while it runs.
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    yield delta
    async for _, delta in deltas:
        yield delta
