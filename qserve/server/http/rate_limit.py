"""Rate limit per API key, or per client address if there are no keys."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from qserve.server.http.api_key import KEY_DIGEST
from qserve.server.http.clients import client_key
from qserve.server.http.errors import ApiError

MAX_BUCKETS = 10_000  # beyond this number full buckets are dropped; a new bucket is full as well
SECONDS = 60.0


@dataclass(slots=True)
class _Bucket:
    left: float
    filled: float  # time of the last update


class LimitRate:
    """ASGI middleware that answers 429 if a client sends more than `limit` POSTs per minute.

    Each client has a token bucket of `limit` requests. RequireKey runs first, so keys are valid.
    """

    def __init__(
        self,
        app: ASGIApp,
        limit: int,
        *,
        by_key: bool,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app, self._limit, self._by_key, self._now = app, limit, by_key, now
        self._buckets: dict[object, _Bucket] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            wait = self._take(self._client(scope))
            if wait > 0:
                seconds = math.ceil(wait)
                error = ApiError(
                    429,
                    f"Rate limit exceeded: {self._limit} requests per minute.",
                    f"Try again in {seconds} s.",
                    headers={"Retry-After": str(seconds)},
                )
                await error.response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _client(self, scope: Scope) -> object:
        if self._by_key:
            return scope["state"][KEY_DIGEST]
        return client_key(scope)

    def _take(self, client: object) -> float:
        """Take one request from a client's bucket. Returns 0, or seconds to wait if it is empty."""
        now, speed = self._now(), self._limit / SECONDS
        if client not in self._buckets and len(self._buckets) >= MAX_BUCKETS:
            self._forget_full(now, speed)
        bucket = self._buckets.setdefault(client, _Bucket(self._limit, now))
        bucket.left = min(self._limit, bucket.left + (now - bucket.filled) * speed)
        bucket.filled = now
        if bucket.left < 1:
            return (1 - bucket.left) / speed
        bucket.left -= 1
        return 0.0

    def _forget_full(self, now: float, speed: float) -> None:
        self._buckets = {
            client: bucket
            for client, bucket in self._buckets.items()
            if bucket.left + (now - bucket.filled) * speed < self._limit
        }
