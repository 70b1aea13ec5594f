"""WebServer: uvicorn with our HTTP protocol, TLS options and an orderly stop."""

import asyncio
import contextlib
import functools
import logging
import socket
import ssl
import threading

import uvicorn
from starlette.types import ASGIApp

from qserve.config import ServerConfig
from qserve.server.http.http_protocol import (
    ACCEPTED_AT_ONCE,
    KERNEL_QUEUE,
    Connections,
    HttpProtocol,
)
from qserve.server.http.listener import address, address_error

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 0.05  # polling interval while the server stops
REPLY_GRACE = 1  # seconds for clients to read the error of an aborted request


class WebServer(uvicorn.Server):
    """uvicorn server that prints a ready line. The caller handles signals and the exit code."""

    def __init__(
        self,
        config: uvicorn.Config,
        ready_line: str,
        shutdown_timeout: float,
        stopping: threading.Event,
    ) -> None:
        super().__init__(config)
        self._ready_line, self._shutdown_timeout = ready_line, shutdown_timeout
        self._stopping = stopping  # set from the first signal on
        self._draining: asyncio.Task | None = None

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def capture_signals(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        where = address(sockets[0], tls=self.config.is_ssl)
        try:
            await super().startup(sockets=sockets)
        except OSError as error:
            raise address_error(where, error) from error
        sockets[0].listen(KERNEL_QUEUE)  # longer than what one accept call takes
        with contextlib.suppress(OSError):  # a full disk: the server serves nevertheless
            print(self._ready_line, where, flush=True)

    async def finish_replies(self) -> None:
        """Wait until aborted requests have sent their errors, then close all connections."""
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=REPLY_GRACE)
        # The remaining requests wait for their clients, for example for the rest of a body. If they
        # were cancelled with the loop, the log would show a failure of the server.
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=REPLY_GRACE)

    def stop(self) -> None:
        """Let running requests finish until the shutdown timeout; a second call aborts them.

        Meanwhile the server listens, and `/ready` and new requests get 503. Requests are aborted by
        closing the engine, so that each still gets its error; uvicorn's own limit would cut them
        off in the middle of a line.
        """
        count = len(self.server_state.tasks)
        if self.is_stopping:
            if count:
                logger.warning("Aborting %d running requests", count)
            self.should_exit = self.force_exit = True
        else:
            seconds = self._shutdown_timeout
            logger.info("Stopping; %d running requests may take %g s to finish", count, seconds)
            self._stopping.set()
            self._draining = asyncio.create_task(self._drain())
            asyncio.get_running_loop().call_later(seconds, self.stop)

    async def _drain(self) -> None:
        while self.server_state.tasks:
            await asyncio.sleep(DRAIN_SECONDS)
        self.should_exit = True


def uvicorn_config(app: ASGIApp, connections: Connections, **options: object) -> uvicorn.Config:
    """uvicorn's configuration: our HTTP protocol with its limits, and our logging."""
    return uvicorn.Config(
        app,
        http=functools.partial(HttpProtocol, connections=connections),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=ACCEPTED_AT_ONCE,
        **options,
    )


def tls_options(config: ServerConfig) -> dict[str, object]:
    """uvicorn's TLS options."""
    if config.ssl_certfile is None:
        return {}
    options = {
        name: getattr(config, name) for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
    }
    needs_client = config.ssl_ca_certs is not None
    return options | {"ssl_cert_reqs": ssl.CERT_REQUIRED if needs_client else ssl.CERT_NONE}
