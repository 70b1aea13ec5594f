"""Error replies to clients: OpenAI's envelope, bounded in size, without internal details."""

import logging
import re

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from formats.errors import InputError
from qserve.errors import BusyError, ParameterError

MAX_MESSAGE = 1000  # characters; a message may quote the client's text, which may be long
MAX_PARAM = 100

# status -> error type in OpenAI's API
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
RETRY_SECONDS = 5  # Retry-After of a 503

INTERNAL = "Internal server error. See the server's log."
CLIENT_GONE = 499  # status in logs and metrics if the client disconnected

logger = logging.getLogger(__name__)


class ApiError(Exception):
    """An error reply: problem and remedy. `param` names the faulty field of the request."""

    def __init__(
        self,
        status: int,
        problem: str,
        remedy: str,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """`problem` names the field or object. `problem` and `remedy` are sentences."""
        message = f"{problem} {remedy}".strip()
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.headers = dict(headers or {})
        if status == 503:
            self.headers["Retry-After"] = str(RETRY_SECONDS)

    @classmethod
    def relayed(
        cls,
        status: int,
        message: str,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> "ApiError":
        """Return the error for a message that already ends with its remedy, such as an engine's."""
        return cls(status, message, "", param, headers)

    @property
    def short_message(self) -> str:
        return _shorten(self.message, MAX_MESSAGE)

    @property
    def envelope(self) -> dict[str, dict]:
        return {
            "error": {
                "message": self.short_message,
                "type": TYPES.get(self.status, "invalid_request_error"),
                "param": None if self.param is None else _shorten(self.param, MAX_PARAM),
                "code": self.status,
            }
        }

    @property
    def response(self) -> Response:
        return json_response(self.envelope, self.status, self.headers)


class ClientGone(Exception):
    """The client closed the connection."""


def engine_dead(is_restarting: bool) -> ApiError:
    what = "it is restarting" if is_restarting else "the server is stopping"
    return ApiError(503, f"The engine has died; {what}.", "Try again later.")


def engine_lost() -> ApiError:
    """Return the error for a request whose engine died, if others run or it runs again."""
    return ApiError(503, "The engine died before the answer was complete.", "Try again.")


def stopped() -> ApiError:
    return ApiError(
        503, "The server was stopped before the answer was complete.", "Try again later."
    )


def deadline_passed(seconds: float) -> ApiError:
    return ApiError(
        408,
        f"The request exceeded its deadline of {seconds:g} s.",
        "Ask for fewer tokens, or allow more time.",
        headers={"x-should-retry": "false"},
    )


def generation_failed() -> ApiError:
    """Return the error for a request that would fail again, on a working engine."""
    return ApiError(
        500,
        "The generation failed: the model returned no valid probabilities (NaN) for this request,"
        " and would again.",
        "See the server's log; `qserve inspect` finds broken weights.",
        headers={"x-should-retry": "false"},  # by default OpenAI's clients retry a 500
    )


def as_api_error(error: Exception) -> ApiError:
    """Convert any exception to an ApiError. Unexpected exceptions are logged, not shown."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ParameterError):
        return ApiError.relayed(400, str(error), error.subject)
    if isinstance(error, BusyError):
        return ApiError.relayed(503, _without_request_id(error))
    if isinstance(error, InputError):
        return ApiError.relayed(400, _without_request_id(error))
    logger.error("A request failed", exc_info=error)
    return ApiError.relayed(500, INTERNAL)


def _without_request_id(error: InputError) -> str:
    """Return an error's text. The engine's id of the request, which clients do not know, is cut."""
    subject = re.sub(r"^request \S+", "request", error.subject)
    return str(InputError(subject, error.problem, error.remedy))


def json_response(
    content: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    body = msgspec.json.encode(content)
    return Response(body, status, headers, media_type="application/json")


def add_error_handlers(app: Starlette) -> None:
    """Register handlers that put every error, also the framework's, into OpenAI's envelope."""

    async def from_exception(request: Request, error: Exception) -> Response:
        return as_api_error(error).response

    async def from_framework(request: Request, error: HTTPException) -> Response:
        problem = f"{error.detail}: {request.method} {request.url.path}."
        allowed = (error.headers or {}).get("Allow")
        remedy = f"Use {allowed}." if allowed else "GET /docs shows the routes."
        return ApiError(error.status_code, problem, remedy, headers=error.headers).response

    async def internal(request: Request, error: Exception) -> Response:
        # The framework re-raises the error after this reply, and the web server logs it.
        return ApiError.relayed(500, INTERNAL).response

    async def nobody(request: Request, error: ClientGone) -> Response:
        return Response(status_code=CLIENT_GONE)

    app.add_exception_handler(ApiError, from_exception)
    app.add_exception_handler(InputError, from_exception)
    app.add_exception_handler(HTTPException, from_framework)
    app.add_exception_handler(ClientGone, nobody)
    app.add_exception_handler(Exception, internal)


def _shorten(text: str, limit: int) -> str:
    # Lone surrogates cannot be encoded as UTF-8.
    text = text.encode(errors="replace").decode()
    return text if len(text) <= limit else text[: limit - 3] + "..."
