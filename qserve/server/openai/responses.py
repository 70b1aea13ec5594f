"""POST /v1/responses and /v1/responses/input_tokens. A reply is one object or a stream of events.

With --response-store a request may refer to stored items, and the response is stored.
"""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from qserve.output_parsing.output_parser import Message, OutputParser
from qserve.output_parsing.pieces import CONTENT
from qserve.server.http.api_key import key_digest
from qserve.server.http.clients import client_key
from qserve.server.http.event_stream import EventStream
from qserve.server.http.large_response import LargeResponse
from qserve.server.http.route_list import RouteList
from qserve.server.openai.answer import PreparedRequest, prepare, prepare_body
from qserve.server.openai.generation import Deltas, Output
from qserve.server.openai.replies import Counts
from qserve.server.openai.response_items import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    Items,
    TokenPieces,
    entries,
)
from qserve.server.openai.stored_request import StoredRequest
from qserve.server.requests.job import Job
from qserve.server.service import service_of
from qserve.text.tokenizer import Tokenizer

Keep = Callable[[dict[str, Any]], Awaitable[str | None]]
ENDINGS = (f"response.{COMPLETED}", f"response.{INCOMPLETE}")

routes = RouteList()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseReply:
    """Builds the response object, and its stream events."""

    job: Job
    model: str
    tokenizer: Tokenizer
    created: int = field(default_factory=lambda: int(time.time()))
    stored: dict[str, Any] = field(default_factory=dict)  # StoredRequest.fields

    def whole(self, outputs: list[Output]) -> dict:
        """Return the whole reply."""
        (output,) = outputs
        items, parsing = self._items(), self.job.parsing
        found = Message(content=output.text)
        if parsing is not None:
            is_cut = output.finish_reason == "length"
            found = Message.of(OutputParser(parsing).parse(output.text, is_cut=is_cut))
        items.add_whole(found, _status(output), self._logprobs(output))
        return self._response(output, items.fields)

    def _logprobs(self, output: Output) -> list[dict]:
        """Return the log probabilities of the message in a whole output."""
        tokens = list(zip(output.token_ids, output.logprobs, strict=False))
        if not tokens:
            return []
        pieces, in_message, start = self._pieces(), [], 0
        for index, (text, num_tokens) in enumerate(output.parts, start=1):
            end = start + num_tokens
            ending = output.finish_reason if index == len(output.pieces) else None
            for piece, found in pieces.push(text, tokens[start:end], ending=ending):
                in_message += found if piece.kind == CONTENT else ()
            start = end
        return entries(self.tokenizer, in_message)

    def _pieces(self) -> TokenPieces:
        parsing = self.job.parsing
        return TokenPieces(self.tokenizer, None if parsing is None else OutputParser(parsing))

    async def events(self, deltas: Deltas) -> AsyncGenerator[dict, None]:
        """Yield the events of the stream; `type` is the event's name."""
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
            tokens = zip(delta.event.token_ids, delta.event.logprobs, strict=False)
            for piece, found in pieces.push(delta.text, tokens, ending=delta.finish_reason):
                for kind, fields in items.take(piece, entries(self.tokenizer, found)):
                    yield event(kind, fields)
        status = _status(output)
        for kind, fields in items.end(status):
            yield event(kind, fields)
        yield event(status, {"response": self._response(output, items.fields)})

    def _items(self) -> Items:
        return Items(key=self.job.name, call_ids=self.job.parsing)

    def _response(self, output: Output | None, items: list[dict]) -> dict:
        """Return the response object. `output`: None before the first token."""
        (params,) = self.job.params
        status = _status(output)
        reason = None
        if status == INCOMPLETE:
            is_full = output is None or output.finish_reason == "length"
            reason = {"reason": "max_output_tokens" if is_full else "aborted"}
        return {
            "id": self.job.request_id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == COMPLETED else None,
            "status": status,
            "background": False,
            "error": None,
            "frequency_penalty": params.frequency_penalty,
            "incomplete_details": reason,
            "model": self.model,
            "output": items,
            "parallel_tool_calls": True,
            "presence_penalty": params.presence_penalty,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": 0,
            "top_p": params.top_p,
            "usage": None if output is None else self._usage(output),
            **self.job.repeated,
            **self.stored,
        }

    def _usage(self, output: Output) -> dict:
        num_prompt, counts = self.job.num_prompt_tokens, Counts(parsing=self.job.parsing)
        num_output, num_cached = len(output.token_ids), output.facts.num_cached
        for text, num_tokens in output.parts:
            counts.add_reasoning(0, text, num_tokens)
        return {
            "input_tokens": num_prompt,
            # OpenAI counts cache writes that a client requests. Here caching is automatic.
            "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": counts.num_reasoning or 0},
            "total_tokens": num_prompt + num_output,
        }


def _status(output: Output | None) -> str:
    if output is None:
        return IN_PROGRESS
    return INCOMPLETE if output.finish_reason in ("length", "abort") else COMPLETED


@routes.post("/v1/responses")
async def responses(request: Request) -> Response:
    stored = _stored_request(request)
    if stored is None:
        prepared = await prepare(request, "responses")
        return await _reply(prepared, ResponseReply(**prepared.reply_fields), None)
    with stored.own_indices():
        prepared = await prepare(request, "responses", stored.expand)
    reply = ResponseReply(**prepared.reply_fields, stored=stored.fields)
    return await _reply(prepared, reply, stored.keep)


@routes.post("/v1/responses/input_tokens")
async def input_tokens(request: Request) -> Response:
    """Count the input tokens of a response, stored items that it refers to included."""
    stored = _stored_request(request)
    given = request, service_of(request), client_key(request.scope), "input_tokens"
    if stored is None:
        return LargeResponse([await prepare_body(*given)])
    with stored.own_indices():
        return LargeResponse([await prepare_body(*given, rewrite=stored.expand)])


def _stored_request(request: Request) -> StoredRequest | None:
    """Return the request's access to stored items; None without --response-store."""
    service = service_of(request)
    if service.store is None:
        return None
    return StoredRequest(
        service=service,
        store=service.store,
        client=client_key(request.scope),
        owner=key_digest(request.scope),
    )


async def _reply(prepared: PreparedRequest, reply: ResponseReply, keep: Keep | None) -> Response:
    if prepared.job.streams:
        return EventStream(_events(prepared, reply, keep), prepared.headers, are_named=True)
    return await prepared.whole(reply.whole, keep)


async def _events(
    prepared: PreparedRequest, reply: ResponseReply, keep: Keep | None
) -> AsyncGenerator[dict, None]:
    async with aclosing(prepared.deltas()) as deltas:
        async for event in reply.events(deltas):
            if keep is not None and event["type"] in ENDINGS:
                await keep(event["response"])  # before the event: the client may then refer to it
            yield event
