"""Steps that all generating endpoints share: read the body, prepare a job, run the job, reply.

The reply header `x-ignored-fields` names request fields without effect. `x-warnings` reports values
that the server changed, and constraints that are not enforced. Both are logged.
"""

import logging
import math
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from qserve.server.http.api_key import key_digest
from qserve.server.http.body import Body
from qserve.server.http.clients import client_key
from qserve.server.http.errors import ApiError, engine_dead
from qserve.server.http.event_stream import EventStream, while_connected
from qserve.server.http.large_response import LargeResponse, json_pieces
from qserve.server.observability.tracing import trace_headers
from qserve.server.openai import generation
from qserve.server.openai.generation import Deltas, Output
from qserve.server.openai.replies import Counts, Reply
from qserve.server.requests.job import Arrival, Job
from qserve.server.service import Service, service_of

TIMEOUT_HEADER = "x-request-timeout"
IGNORED_HEADER = "x-ignored-fields"
WARNINGS_HEADER = "x-warnings"
MAX_NAMES = 32
MAX_WARNINGS = 8
MAX_WARNING_CHARS = 200  # per warning
NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")  # field names that may appear in a header
NOT_IN_HEADERS = re.compile(r"[^ -~]|;")  # ; separates warnings
OTHERS = "..."
Rewrite = Callable[[bytearray], Awaitable[bytes | bytearray]]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request with its job, ready to run."""

    request: Request
    service: Service
    client: str  # client_key of http/clients.py
    job: Job
    headers: dict[str, str]  # headers of the reply

    @property
    def reply_fields(self) -> dict[str, Any]:
        """Constructor arguments that all reply classes share."""
        return {
            "job": self.job,
            "model": self.service.name_for(self.job),
            "tokenizer": self.service.tokenizer,
        }

    @property
    def fingerprint(self) -> str | None:
        """The system_fingerprint of the reply, for the model with the job's adapter."""
        lora = self.job.options.lora
        name = None if lora is None else lora.lora_name
        return self.service.client.state.fingerprint_of(name) or None

    def deltas(self) -> Deltas:
        """Run the job and yield the text of its choices as it arrives."""
        return generation.deltas(self.service, self.client, self.job)

    async def whole(
        self,
        reply: Callable[[list[Output]], dict[str, Any]],
        keep: Callable[[dict[str, Any]], Awaitable[str | None]] | None = None,
    ) -> Response:
        """Run the job to its end, and return the response with the JSON `reply(outputs)`.

        `keep`: stores the reply before it is sent, and returns a warning if it cannot.
        """
        work = generation.run(self.service, self.client, self.job)
        outputs = await while_connected(self.request.receive, work)
        headers, run = self.headers, self.service.preparation.run
        if keep is not None:
            content = await run(self.client, reply, outputs)
            headers = headers | one_warning(await keep(content))
            return await run(self.client, lambda: LargeResponse(json_pieces(content), headers))
        # In a thread, since encoding vectors or log probabilities of many outputs takes seconds.
        return await run(self.client, lambda: LargeResponse(json_pieces(reply(outputs)), headers))


async def prepare(request: Request, route: str, rewrite: Rewrite | None = None) -> PreparedRequest:
    """Read a request's body and prepare its job. Raises ApiError.

    route: a key of JOBS
    rewrite: changes the body before it is prepared
    """
    service, client = service_of(request), client_key(request.scope)
    timeout = deadline_seconds(request.headers, service.request_timeout)
    job = await prepare_body(request, service, client, route, timeout, rewrite)
    request.state.request_id = job.name  # the body may set the id
    headers = reply_headers(job, priority_counts=service.priority_counts)
    return PreparedRequest(
        request=request, service=service, client=client, job=job, headers=headers
    )


async def prepare_body(
    request: Request,
    service: Service,
    client: str,
    route: str,
    timeout: float | None = None,
    rewrite: Rewrite | None = None,
) -> Job | bytes:
    """Read a request's body and prepare its job, or its whole reply in bytes. Raises ApiError.

    route: a key of JOBS or ANSWERS
    timeout: seconds from the arrival of the body to the end of the reply
    rewrite: changes the body before it is prepared
    """
    if service.is_stopping():
        raise ApiError(
            503, "The server is stopping.", "Try again later.", headers={"Connection": "close"}
        )
    if service.is_refusing:
        raise ApiError(503, "The model is paused or asleep.", "Try again later.")
    with Body(request, client, service) as body:
        content = await body.read()
        arrival = Arrival(
            time=time.perf_counter(),
            name=request.state.request_id,
            is_named=request.state.is_named,
            timeout=timeout,
            trace_headers=trace_headers(request.headers) if service.tracing.is_on else {},
            key_digest=key_digest(request.scope) if service.salt_by_key else "",
        )
        # The engine may have died while the body was received.
        if not service.client.is_alive:
            raise engine_dead(service.client.is_restarting)
        if rewrite is not None:
            content = await rewrite(content)
        return await service.preparation.prepare(client, service.model, route, content, arrival)


async def answer(request: Request, route: str, kind: type[Reply]) -> Response:
    """Reply to a request that generates text, with one object or a stream of chunks."""
    prepared = await prepare(request, route)
    reply = kind(**prepared.reply_fields, fingerprint=prepared.fingerprint)
    if prepared.job.streams:
        return EventStream(_chunks(prepared, reply), prepared.headers)
    return await prepared.whole(reply.whole)


async def _chunks(prepared: PreparedRequest, reply: Reply) -> AsyncGenerator[dict, None]:
    opened: set[int] = set()
    counts = Counts(parsing=prepared.job.parsing)
    async with aclosing(prepared.deltas()) as deltas:
        async for index, delta in deltas:
            if index not in opened:
                opened.add(index)
                opening = reply.opening(index, delta, counts)
                if opening is not None:
                    yield opening
            counts.add(index, delta)
            # Send a chunk also for tokens whose text is held back: clients time chunks as tokens.
            if delta.text or delta.event.token_ids or delta.finish_reason is not None:
                yield reply.chunk(index, delta, counts)
    if prepared.job.streams_usage:
        yield reply.usage_chunk(counts)


def deadline_seconds(headers: Mapping[str, str], limit: float | None) -> float | None:
    """Return the time limit of a request in seconds; None: no limit. Raises ApiError(400)."""
    text = headers.get(TIMEOUT_HEADER)
    if text is None:
        return limit
    try:
        asked = float(text)
    except ValueError:
        asked = math.nan
    if not 0 < asked < math.inf:
        raise ApiError(
            400,
            f"{TIMEOUT_HEADER}: expected seconds, found {text[:100]!r}.",
            "Give a number above 0, or leave the header out.",
            TIMEOUT_HEADER,
        )
    return asked if limit is None else min(asked, limit)


def reply_headers(job: Job, *, priority_counts: bool) -> dict[str, str]:
    """Return headers with the ignored fields and warnings of a job."""
    ignored = list(job.ignored)
    if job.options.priority and not priority_counts:
        ignored.append("priority")
    return _ignored_fields(job, ignored) | _warnings(job)


def one_warning(warning: str | None) -> dict[str, str]:
    """Return the header for a warning that arises with the reply; {} for None."""
    if warning is None:
        return {}
    return {WARNINGS_HEADER: NOT_IN_HEADERS.sub("?", warning)[:MAX_WARNING_CHARS]}


def _ignored_fields(job: Job, ignored: list[str]) -> dict[str, str]:
    if not ignored:
        return {}
    shown = [name for name in ignored if NAME.fullmatch(name)][:MAX_NAMES]
    if len(shown) < len(ignored):
        shown.append(OTHERS)
    text = ", ".join(shown)
    logger.info("Request %s has fields without effect: %s", job.request_id, text)
    return {IGNORED_HEADER: text}


def _warnings(job: Job) -> dict[str, str]:
    if not job.warnings:
        return {}
    shown = [NOT_IN_HEADERS.sub("?", each)[:MAX_WARNING_CHARS] for each in job.warnings]
    if len(shown) > MAX_WARNINGS:
        shown[MAX_WARNINGS:] = [f"and {len(shown) - MAX_WARNINGS} more"]
    text = "; ".join(shown)
    logger.info("Request %s: %s", job.request_id, text)
    return {WARNINGS_HEADER: text}
