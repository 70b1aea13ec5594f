"""WebServer: uvicorn with HttpProtocol, TLS options and a graceful stop."""

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
from qserve.server.http.listener import address, address_error, allow_restart

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
        self._stopping = stopping  # set by the first stop signal
        self._draining: asyncio.Task | None = None

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def capture_signals(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        where = address(sockets[0], tls=self.config.is_ssl)
        allow_restart(sockets[0])
        try:
            await super().startup(sockets=sockets)
        except OSError as error:
            raise address_error(where, error) from error
        sockets[0].listen(KERNEL_QUEUE)  # uvicorn's backlog also limits one call of accept
        with contextlib.suppress(OSError):  # serve even if stdout is on a full disk
            print(self._ready_line, where, flush=True)

    async def finish_replies(self) -> None:
        """Wait until aborted requests have sent their errors, then close all connections."""
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=REPLY_GRACE)
        # The remaining requests wait for their clients, for example for the rest of a body. Close
        # them here: if the end of the event loop cancelled them, the log would show an error.
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=REPLY_GRACE)

    def stop(self) -> None:
        """Stop once running requests finish, at the latest after the shutdown timeout.

        Until then the server still listens; `/ready` and new requests get 503. The timeout, or a
        second call, aborts the running requests. They are aborted by closing the engine, so that
        each client gets an error; uvicorn's own timeout would cut replies off mid-line.
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
    """Return uvicorn's configuration, with HttpProtocol and without uvicorn's logging."""
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
    """Return uvicorn's options for TLS; {} without --ssl-certfile."""
    if config.ssl_certfile is None:
        return {}
    options = {
        name: getattr(config, name) for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
    }
    needs_client = config.ssl_ca_certs is not None
    return options | {"ssl_cert_reqs": ssl.CERT_REQUIRED if needs_client else ssl.CERT_NONE}
