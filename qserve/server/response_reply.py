"""The reply of POST /v1/responses: OpenAI's response object, whole and as a stream of events."""

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from qserve.output_parsing.output_parser import Message, OutputParser
from qserve.output_parsing.pieces import CONTENT
from qserve.server.generation import Deltas, Output
from qserve.server.job import Job
from qserve.server.replies import Counts
from qserve.server.response_items import COMPLETED, IN_PROGRESS, INCOMPLETE, Items
from qserve.server.response_logprobs import TokenPieces, entries
from qserve.text import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseReply:
    """What the object and all events of one reply share."""

    job: Job
    model: str
    tokenizer: Tokenizer
    created: int = field(default_factory=lambda: int(time.time()))

    prefix = "resp_"  # as OpenAI writes it: clients look for it

    def whole(self, outputs: list[Output]) -> dict:
        """The reply that is not streamed."""
        (output,) = outputs
        items, parsing = self._items(), self.job.parsing
        found = Message(content=output.text)
        if parsing is not None:
            pieces = OutputParser(parsing).parse(output.text)
            found = Message.of(pieces, is_cut=output.finish_reason == "length")
        items.add_whole(found, _status(output), self._logprobs(output))
        return self._response(output, items.fields)

    def _logprobs(self, output: Output) -> list[dict]:
        """Of a whole output's message, piece by piece as it came."""
        tokens = list(zip(output.token_ids, output.logprobs, strict=False))
        if not tokens:
            return []
        pieces, told, start = self._pieces(), [], 0
        for index, (text, num_tokens) in enumerate(output.parts, start=1):
            end, is_end = start + num_tokens, index == len(output.pieces)
            for piece, found in pieces.push(text, tokens[start:end], is_end=is_end):
                told += found if piece.kind == CONTENT else ()
            start = end
        return entries(self.tokenizer, told)

    def _pieces(self) -> TokenPieces:
        parsing = self.job.parsing
        return TokenPieces(self.tokenizer, None if parsing is None else OutputParser(parsing))

    async def events(self, deltas: Deltas) -> AsyncGenerator[dict, None]:
        """The stream's events; `type` names each."""
        output, number = Output(), 0
        items, pieces = self._items(), self._pieces()

        def event(kind: str, fields: dict[str, Any]) -> dict:
            nonlocal number
            number += 1
            return {"type": f"response.{kind}", "sequence_number": number - 1, **fields}

        has_begun = False
        async for _, delta in deltas:
            if not has_begun:
                for kind in ("created", "in_progress"):
                    yield event(kind, {"response": self._response(None, [])})
            has_begun = True
            output.add(delta)
            tokens = zip(delta.token_ids, delta.logprobs, strict=False)
            is_end = delta.finish_reason is not None
            for piece, found in pieces.push(delta.text, tokens, is_end=is_end):
                for kind, fields in items.take(piece, entries(self.tokenizer, found)):
                    yield event(kind, fields)
        status = _status(output)
        for kind, fields in items.end(status):
            yield event(kind, fields)
        yield event(status, {"response": self._response(output, items.fields)})

    def _items(self) -> Items:
        return Items(key=self.job.request_id.removeprefix(self.prefix), call_ids=self.job.parsing)

    def _response(self, output: Output | None, items: list[dict]) -> dict:
        """The response object; without an output, as it is before the first token."""
        (params,) = self.job.params
        status = _status(output)
        reason = {"reason": "max_output_tokens"} if status == INCOMPLETE else None
        return {
            "id": self.job.request_id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": reason,
            "model": self.model,
            "output": items,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": params.top_p,
            "usage": None if output is None else self._usage(output),
            **self.job.repeated,
        }

    def _usage(self, output: Output) -> dict:
        num_prompt, counts = self.job.num_prompt_tokens, Counts(parsing=self.job.parsing)
        for text, num_tokens in output.parts:
            counts.add_reasoning(0, text, num_tokens)
        return {
            "input_tokens": num_prompt,
            # OpenAI counts writes that a client asks for; here pages are kept without that.
            "input_tokens_details": {"cached_tokens": output.num_cached, "cache_write_tokens": 0},
            "output_tokens": output.num_tokens,
            "output_tokens_details": {"reasoning_tokens": counts.num_reasoning or 0},
            "total_tokens": num_prompt + output.num_tokens,
        }


def _status(output: Output | None) -> str:
    if output is None:
        return IN_PROGRESS
    return INCOMPLETE if output.finish_reason == "length" else COMPLETED
