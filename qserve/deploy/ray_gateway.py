"""Gateway: the Ray Serve deployment that clients reach. It sends each request to a replica.

Ray's proxy does not read bodies, so it cannot route by their contents. The gateway forwards a
replica's answer unchanged. If the replica dies, its open streams end with an error event, and
requests that have no answer yet get status 503.
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
from qserve.deploy.routed_request import RoutedRequest, look_into
from qserve.server.http.errors import ApiError, json_response
from qserve.server.observability.metrics_pages import join_pages

METRICS, MODELS = "/metrics", "/v1/models"
EVERYWHERE = (METRICS, "/reset_prefix_cache", "/start_profile", "/stop_profile")
NAMED_EVENTS = "/v1/responses"  # this route has named events and no [DONE]
READ_SECONDS = 30.0  # time limit for the metrics of all replicas
LOST = "The replica that ran the request died."

logger = logging.getLogger(__name__)


class Gateway:
    """The ingress deployment."""

    def __init__(
        self, replicas: DeploymentHandle, names: tuple[str, ...], config: ServerConfig
    ) -> None:
        """`names`: names of all models that clients can request."""
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
            raise ApiError(
                503, "All replicas are full.", "Try again in 1 s.", headers={"Retry-After": "1"}
            ) from None
        except (RayError, RayServeException, StopAsyncIteration) as error:
            logger.warning("A replica gave no answer: %s", type(error).__name__)
            raise ApiError(503, LOST, "Try again.", headers={"Retry-After": "1"}) from None
        except asyncio.CancelledError:
            answer.cancel()
            raise
        is_stream = any(
            name == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in headers
        )
        pieces = _pieces(answer, _last_words(routed.path) if is_stream else None)
        response = StreamingResponse(pieces, status_code=status)
        # Ray assigns the request id (the client's, if it sent one) and returns it.
        response.raw_headers = [each for each in headers if each[0] != b"x-request-id"]
        return response

    def _place(self, model: str | None) -> str:
        """Return the model whose replicas get the request, or "" if there is only one model."""
        if len(self._names) < 2:
            return ""
        # Any replica rejects an unknown name.
        return model if model in self._names else self._names[0]

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._config.max_body_bytes:
                raise ApiError(
                    413,
                    f"expected a body of at most {self._config.max_body_bytes} bytes.",
                    "Send a smaller body.",
                )
        return bytes(body)

    async def _ask_all(self, routed: RoutedRequest) -> Response:
        """Ask all replicas and join their metrics. For other routes, or if one failed, return one.

        The returned answer is the one with the highest status.
        """
        try:
            found = await self._replicas.broadcast("answer_whole", routed).results_async(
                timeout_s=READ_SECONDS, return_exceptions=True
            )
        except (RayError, RayServeException, TimeoutError):
            found = []
        answers = [each for part in found if isinstance(part, list) for each in part]
        if not answers:
            raise ApiError(503, "The replicas do not answer.", "Try again later.")
        _, status, body = max(answers, key=lambda answer: answer[1])
        if status != 200 or routed.path != METRICS:
            return Response(body, status_code=status, media_type="application/json")
        pages = {name: page.decode() for name, _, page in answers}
        return Response(join_pages(pages, "replica"), media_type="text/plain; version=0.0.4")

    def _models(self) -> Response:
        """List all models that can be requested, loaded or not."""
        cards = [{"id": name, "object": "model", "owned_by": "qserve"} for name in self._names]
        return json_response({"object": "list", "data": cards})


async def _pieces(
    answer: DeploymentResponseGenerator, last_words: bytes | None
) -> AsyncGenerator[bytes, None]:
    """Yield the rest of an answer. A stream whose replica dies ends with `last_words`."""
    is_whole = False
    try:
        iterator: AsyncIterator[bytes] = aiter(answer)
        async for piece in iterator:
            yield piece
        is_whole = True
    except (RayError, RayServeException) as error:
        logger.warning("A replica died in the middle of an answer: %s", type(error).__name__)
        is_whole = True
        if last_words is None:
            raise  # breaks the connection, so that the client knows that the answer is incomplete
        yield last_words
    finally:
        if not is_whole:
            answer.cancel()


def _last_words(path: str) -> bytes:
    """Return the last bytes of a broken stream, in the format of its route."""
    data = b"data: " + msgspec.json.encode(ApiError(503, LOST, "Try again.").envelope) + b"\n\n"
    if path == NAMED_EVENTS:
        return b"event: error\n" + data
    return data + b"data: [DONE]\n\n"
