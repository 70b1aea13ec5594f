"""Gateway: the deployment of Ray Serve that clients reach. Reads a request, sends it to a replica.

A proxy of Ray's cannot route by what a body says, since it does not read it. What an answer is
stays the replica's business, down to its bytes. If the replica dies meanwhile, the streams that it
had begun end with an error event, and what has no answer yet gets a 503.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator

import msgspec
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from qserve.config import ServerConfig
from qserve.deploy.metrics_pages import join_pages
from qserve.deploy.routed_request import RoutedRequest, look_into
from qserve.server.errors import ApiError, json_response

METRICS, MODELS = "/metrics", "/v1/models"
EVERYWHERE = (METRICS, "/reset_prefix_cache", "/start_profile", "/stop_profile")
NAMED_EVENTS = "/v1/responses"  # the route whose events have names, and no [DONE]
READ_SECONDS = 30.0  # that all replicas get to give their metrics
LOST = "The replica that computed the answer is gone. Try again."

logger = logging.getLogger(__name__)


class Gateway:
    """The ingress deployment's class."""

    def __init__(
        self, replicas: DeploymentHandle, names: tuple[str, ...], config: ServerConfig
    ) -> None:
        """`names`: of the models, where there are several."""
        self._replicas = replicas.options(method_name="answer", stream=True)
        self._names, self._config = names, config

    async def __call__(self, request: Request) -> Response:
        try:
            body = await self._body(request)
            model, text = look_into(body)
            routed = RoutedRequest.of_scope(request.scope, body, text)
            if routed.path in EVERYWHERE:
                return await self._ask_all(routed)
            if routed.path == MODELS and len(self._names) > 1:
                return self._models()
            return await self._forward(routed, self._place(model))
        except ApiError as error:
            return error.response
        except ClientDisconnect:
            return Response(status_code=499)

    async def _forward(self, routed: RoutedRequest, model: str) -> Response:
        handle = self._replicas
        if model:
            handle = handle.options(multiplexed_model_id=model)
        answer = handle.remote(routed)
        try:
            status, headers = await anext(aiter(answer))
        except BackPressureError:
            raise ApiError(503, "All replicas are full.", headers={"Retry-After": "1"}) from None
        except (RayError, RayServeException, StopAsyncIteration) as error:
            logger.warning("A replica gave no answer: %s", type(error).__name__)
            raise ApiError(503, LOST, headers={"Retry-After": "1"}) from None
        except asyncio.CancelledError:
            answer.cancel()
            raise
        is_stream = any(
            name == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in headers
        )
        pieces = _pieces(answer, _last_words(routed.path) if is_stream else None)
        response = StreamingResponse(pieces, status_code=status)
        # Ray names the request, by the client's name for it where there is one, and says so.
        response.raw_headers = [each for each in headers if each[0] != b"x-request-id"]
        return response

    def _place(self, model: str | None) -> str:
        """The model whose replica a request goes to; empty where all have the same."""
        if len(self._names) < 2:
            return ""
        # A name that nobody has is refused by whoever gets it.
        return model if model in self._names else self._names[0]

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._config.max_body_bytes:
                raise ApiError(
                    413, f"expected a body of at most {self._config.max_body_bytes} bytes."
                )
        return bytes(body)

    async def _ask_all(self, routed: RoutedRequest) -> Response:
        """The answers of all replicas in one; of one that differs, that."""
        try:
            found = await self._replicas.broadcast("answer_whole", routed).results_async(
                timeout_s=READ_SECONDS, return_exceptions=True
            )
        except (RayError, RayServeException, TimeoutError):
            found = []
        answers = [each for part in found if isinstance(part, list) for each in part]
        if not answers:
            raise ApiError(503, "The replicas do not answer.")
        _, status, body = max(answers, key=lambda answer: answer[1])
        if status != 200 or routed.path != METRICS:
            return Response(body, status_code=status, media_type="application/json")
        pages = {name: page.decode() for name, _, page in answers}
        return Response(join_pages(pages), media_type="text/plain; version=0.0.4")

    def _models(self) -> Response:
        """All that can be asked for, loaded or not."""
        cards = [{"id": name, "object": "model", "owned_by": "qserve"} for name in self._names]
        return json_response({"object": "list", "data": cards})


async def _pieces(
    answer: DeploymentResponseGenerator, last_words: bytes | None
) -> AsyncGenerator[bytes, None]:
    """The rest of an answer; where a stream breaks off, `last_words`."""
    is_whole = False
    try:
        iterator: AsyncIterator[bytes] = aiter(answer)
        async for piece in iterator:
            yield piece
        is_whole = True
    except (RayError, RayServeException) as error:
        logger.warning("A replica ended in the middle of an answer: %s", type(error).__name__)
        is_whole = True
        if last_words is None:
            raise  # the connection breaks off, which no client takes for a whole answer
        yield last_words
    finally:
        if not is_whole:
            answer.cancel()


def _last_words(path: str) -> bytes:
    """What ends a stream, in the form of its route."""
    data = b"data: " + msgspec.json.encode(ApiError(503, LOST).envelope) + b"\n\n"
    if path == NAMED_EVENTS:
        return b"event: error\n" + data
    return data + b"data: [DONE]\n\n"
