"""The server as a whole: the ASGI app, and `serve`, which runs it beside its engine process."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from formats.checkpoint import CONFIG, read_json
from formats.errors import InputError
from qserve import __version__
from qserve.config import EngineConfig, ServerConfig
from qserve.engine.client import EngineClient
from qserve.engine.process import ENGINE
from qserve.server.admission import Admission
from qserve.server.api_key import RequireKey
from qserve.server.errors import add_error_handlers
from qserve.server.metrics import Metrics
from qserve.server.response_count import CountResponses
from qserve.server.routes import router
from qserve.server.sampling import load_defaults
from qserve.server.service import Client, Service
from qserve.text import Tokenizer

MAX_BODY_BYTES = 8 * 2**20
SHUTDOWN_GRACE = 10  # seconds that running requests get to finish after SIGTERM
REPLY_GRACE = 1  # seconds that clients get to read the error of a request that was dropped
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def build_app(
    client: Client,
    tokenizer: Tokenizer,
    config: ServerConfig,
    *,
    max_num_seqs: int,
    max_body_bytes: int = MAX_BODY_BYTES,
    metrics: Metrics | None = None,
) -> FastAPI:
    """The ASGI app for an engine that runs `max_num_seqs` outputs at once.

    `metrics` are those that the engine's reports go to, if any do. Raises InputError for a broken
    generation_config.json.
    """
    app = FastAPI(
        title="qserve", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    admission = Admission(max_num_seqs + config.max_num_queued_reqs, config.max_num_queued_tokens)
    model_name = config.model_name(tokenizer.folder)
    metrics = metrics or Metrics(model_name)
    metrics.watch_admission(admission)
    app.state.service = Service(
        client=client,
        tokenizer=tokenizer,
        model_name=model_name,
        defaults=load_defaults(tokenizer.folder),
        max_body_bytes=max_body_bytes,
        admission=admission,
        metrics=metrics,
    )
    app.include_router(router)
    add_error_handlers(app)
    if config.api_key is not None:
        app.add_middleware(RequireKey, key=config.api_key)
    app.add_middleware(CountResponses, metrics=metrics)  # the last one added comes first
    return app


def serve(engine_config: EngineConfig, config: ServerConfig, *, engine: str = ENGINE) -> int:
    """Serve until SIGINT or SIGTERM (returns 0) or until the engine dies (returns 1).

    Raises InputError when the address, the model or its tokenizer cannot be used.
    """
    return asyncio.run(_serve(engine_config, config, engine))


async def _serve(engine_config: EngineConfig, config: ServerConfig, engine: str) -> int:
    # The address first: a port in use should not show only after a long load.
    with _bind(config.host, config.port) as listener:
        metrics = Metrics(config.model_name(engine_config.model))
        loading = asyncio.create_task(_load(engine_config, engine, metrics))
        with _on_stop_signal(loading.cancel):
            try:
                tokenizer, client = await loading
            except asyncio.CancelledError:
                return 0
        try:
            app = build_app(
                client,
                tokenizer,
                config,
                max_num_seqs=engine_config.max_num_seqs,
                metrics=metrics,
            )
            server = _Server(_uvicorn_config(app), f"Serving {app.state.service.model_name} on")
            with _on_stop_signal(server.stop):
                watch = asyncio.create_task(_stop_when_dead(client, server))
                await server.serve(sockets=[listener])
                watch.cancel()
            code = 0 if client.is_alive else 1
            await client.close()
            await server.finish_replies()
            return code
        finally:
            await client.close()


async def _load(
    config: EngineConfig, engine: str, metrics: Metrics
) -> tuple[Tokenizer, EngineClient]:
    """The tokenizer here and the model in its process, side by side."""
    # A mistyped folder is named as such, not by what its lack does to the tokenizer.
    read_json(Path(config.model) / CONFIG)
    starting = asyncio.create_task(
        EngineClient.start(config, engine=engine, watch=metrics.take_report)
    )
    try:
        tokenizer = await asyncio.to_thread(Tokenizer, config.model)
        return tokenizer, await starting
    except BaseException:
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError, InputError):
            await (await starting).close()
        raise


async def _stop_when_dead(client: EngineClient, server: "_Server") -> None:
    await client.wait_until_dead()
    if not server.should_exit:
        server.stop()


class _Server(uvicorn.Server):
    """uvicorn that says when it is ready, and leaves signals and the exit code to `serve`."""

    def __init__(self, config: uvicorn.Config, ready_line: str) -> None:
        super().__init__(config)
        self._ready_line = ready_line

    def capture_signals(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        host, port = sockets[0].getsockname()[:2]
        try:
            await super().startup(sockets=sockets)
        except OSError as error:
            raise _address_error(host, port, error) from error
        print(self._ready_line, f"http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)

    async def finish_replies(self) -> None:
        """Wait until requests that were dropped have written their errors, then hang up."""
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=REPLY_GRACE)
        # What is left waits for its client, such as for the rest of a body. Cancelled with the
        # loop, it would look like a failure of the server's own.
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=REPLY_GRACE)

    def stop(self) -> None:
        """Let running requests finish for a while; the second time, drop them.

        They are dropped by closing the engine, so that each still gets its error. uvicorn's own
        limit would cut them off in the middle of a line.
        """
        if self.should_exit:
            self.force_exit = True
        else:
            self.should_exit = True
            asyncio.get_running_loop().call_later(SHUTDOWN_GRACE, self.stop)


def _uvicorn_config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
    )


@contextlib.contextmanager
def _on_stop_signal(action: Callable[[], object]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, action)
    try:
        yield
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)


def _bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not listening yet: until then connections are refused."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, OverflowError) as error:
        raise _address_error(host, port, error) from error
    return listener


def _address_error(host: str, port: int, error: Exception) -> InputError:
    return InputError(
        f"{host}:{port}", f"cannot be listened on: {error}", "choose another --host or --port"
    )
