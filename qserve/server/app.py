"""The server as a whole: the ASGI app, and `serve`, which runs it beside its engine process."""

import asyncio
import contextlib
import functools
import gc
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from formats.errors import InputError
from qserve import __version__
from qserve.config import EngineConfig, ServerConfig
from qserve.engine.client import Limits
from qserve.engine.process import ENGINE
from qserve.engine.supervisor import EngineSupervisor
from qserve.log_limit import limit_logging
from qserve.server.admission import Admission
from qserve.server.api_key import RequireKey
from qserve.server.budget import Budget
from qserve.server.errors import add_error_handlers
from qserve.server.framing import RefuseTwoLengths
from qserve.server.http_protocol import (
    ACCEPTED_AT_ONCE,
    KERNEL_QUEUE,
    Connections,
    HttpProtocol,
    max_connections,
    raise_descriptor_limit,
)
from qserve.server.metrics import Metrics
from qserve.server.preparation import Preparation
from qserve.server.response_count import CountResponses
from qserve.server.routes import router
from qserve.server.sampling import load_defaults
from qserve.server.service import Client, Service
from qserve.server.worker import WorkerClient
from qserve.server.worker_messages import Setup
from qserve.text import Tokenizer

NUM_BODIES = 32  # of the greatest length that are held at once, or more of shorter ones
SHUTDOWN_GRACE = 10  # seconds that running requests get to finish after SIGTERM
REPLY_GRACE = 1  # seconds that clients get to read the error of a request that was dropped
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def build_app(
    client: Client,
    tokenizer: Tokenizer,
    config: ServerConfig,
    *,
    max_num_seqs: int,
    metrics: Metrics | None = None,
    preparation: Preparation | None = None,
) -> FastAPI:
    """The ASGI app for an engine that runs `max_num_seqs` outputs at once.

    `metrics` are those that the engine's reports go to, if any do; `preparation` has a worker
    process, if there is one. Raises InputError for a broken generation_config.json.
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
        chat_special_tokens=config.chat_special_tokens,
        max_body_bytes=config.max_body_bytes,
        bodies=Budget(NUM_BODIES * config.max_body_bytes),
        admission=admission,
        preparation=preparation or Preparation(),
        metrics=metrics,
        salt_by_key=config.cache_salt_by_key,
        resets_cache=config.enable_cache_reset,
    )
    app.include_router(router)
    add_error_handlers(app)
    if config.api_key is not None:
        app.add_middleware(RequireKey, key=config.api_key)
    app.add_middleware(RefuseTwoLengths)
    app.add_middleware(CountResponses, metrics=metrics)  # the last one added comes first
    return app


def serve(engine_config: EngineConfig, config: ServerConfig, *, engine: str = ENGINE) -> int:
    """Serve until SIGINT or SIGTERM (returns 0) or until the engine dies (returns 1).

    Raises InputError when the address, the model or its tokenizer cannot be used.
    """
    return asyncio.run(_serve(engine_config, config, engine))


async def _serve(engine_config: EngineConfig, config: ServerConfig, engine: str) -> int:
    limit_logging()
    connections = Connections(
        limit=max_connections(config.max_connections, raise_descriptor_limit())
    )
    # The address first: a port in use should not show only after a long load.
    with _bind(config.host, config.port) as listener:
        metrics = Metrics(config.model_name(engine_config.model))
        loading = asyncio.create_task(_load(engine_config, config, engine, metrics))
        with _on_stop_signal(loading.cancel):
            try:
                tokenizer, client = await loading
            except asyncio.CancelledError:
                return 0
        worker = None
        try:
            worker = _start_worker(client, tokenizer, config)
            app = build_app(
                client,
                tokenizer,
                config,
                max_num_seqs=engine_config.max_num_seqs,
                metrics=metrics,
                preparation=Preparation(worker),
            )
            # What is loaded stays. Else every full collection looks at it, for 100 ms.
            gc.freeze()
            server = _Server(
                uvicorn_config(app, connections), f"Serving {app.state.service.model_name} on"
            )
            with _on_stop_signal(server.stop):
                watches = [
                    asyncio.create_task(_stop_when_dead(client, server)),
                    asyncio.create_task(metrics.watch_loop()),
                ]
                await server.serve(sockets=[listener])
                for watch in watches:
                    watch.cancel()
            code = 0 if client.is_alive or client.is_restarting else 1
            await client.close()
            await server.finish_replies()
            return code
        finally:
            await client.close()
            if worker is not None:
                await worker.close()


async def _load(
    config: EngineConfig, server: ServerConfig, engine: str, metrics: Metrics
) -> tuple[Tokenizer, EngineSupervisor]:
    """The tokenizer here and the model in its process, side by side."""
    starting = asyncio.create_task(
        EngineSupervisor.start(
            config,
            restarts=server.restart_engine,
            engine=engine,
            watch=metrics.take_report,
            limits=Limits(silence=server.engine_timeout, step=server.engine_step_timeout),
            on_restart=metrics.count_restart,
        )
    )
    try:
        tokenizer = await asyncio.to_thread(_load_tokenizer, config.model)
        return tokenizer, await starting
    except BaseException:
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError, InputError):
            await (await starting).close()
        raise


def _load_tokenizer(folder: str) -> Tokenizer:
    from formats.checkpoint import CONFIG, read_json  # loads torch: beside the engine, not before

    # A mistyped folder is named as such, not by what its lack does to the tokenizer.
    read_json(Path(folder) / CONFIG)
    return Tokenizer(folder)


def _start_worker(
    client: EngineSupervisor, tokenizer: Tokenizer, config: ServerConfig
) -> WorkerClient:
    return WorkerClient(
        Setup(
            folder=tokenizer.folder,
            name=config.model_name(tokenizer.folder),
            defaults=load_defaults(tokenizer.folder),
            max_model_len=client.max_model_len,
            vocab_size=client.vocab_size,
            chat_special_tokens=config.chat_special_tokens,
        )
    )


async def _stop_when_dead(client: EngineSupervisor, server: "_Server") -> None:
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
        sockets[0].listen(KERNEL_QUEUE)  # beyond what is taken from it at once
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


def uvicorn_config(app: FastAPI, connections: Connections, **options: object) -> uvicorn.Config:
    """How uvicorn runs the app: within the limits of connections, its log as all else's."""
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
