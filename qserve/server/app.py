"""The server as a whole: the ASGI app, and `serve`, which runs it beside its engine process."""

import asyncio
import contextlib
import functools
import gc
import logging
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware

from formats.errors import InputError
from qserve import logs
from qserve.config import EngineConfig, ServerConfig
from qserve.engine.client import Limits
from qserve.engine.process import ENGINE
from qserve.engine.supervisor import EngineSupervisor
from qserve.generation_defaults import load_defaults
from qserve.log_limit import limit_logging
from qserve.lora.request import LoRARequest, parse_modules
from qserve.output_parsing.reasoning import REASONING_PARSERS
from qserve.server import (
    lora_routes,
    page_routes,
    pooling_routes,
    routes,
    status_routes,
    token_routes,
)
from qserve.server.adapters import ServedAdapters
from qserve.server.admission import Admission
from qserve.server.api_key import RequireKey, load_keys
from qserve.server.budget import Budget
from qserve.server.errors import add_error_handlers
from qserve.server.framing import CheckHead
from qserve.server.http_protocol import (
    ACCEPTED_AT_ONCE,
    KERNEL_QUEUE,
    Connections,
    HttpProtocol,
    max_connections,
    raise_descriptor_limit,
)
from qserve.server.listener import address, address_error, bind, check_tls, remove
from qserve.server.metrics import Metrics
from qserve.server.preparation import Preparation
from qserve.server.profile_routes import profile_routes
from qserve.server.rate_limit import LimitRate
from qserve.server.request_id import NameRequests
from qserve.server.response_count import CountResponses
from qserve.server.root_path import UnderPath
from qserve.server.service import Client, Service
from qserve.server.tracing import Tracing, tracing_to
from qserve.server.worker import WorkerClient
from qserve.server.worker_messages import Setup
from qserve.text import Tokenizer

logger = logging.getLogger(__name__)

NUM_BODIES = 32  # of the greatest length that are held at once, or more of shorter ones
# Policies that do not look at a request's priority; one of the user's own may.
ORDER_OF_ARRIVAL = ("fcfs", "prefill-first", "longest-prefix", "controlled")
REPLY_GRACE = 1  # seconds that clients get to read the error of a request that was dropped
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def build_app(
    client: Client,
    tokenizer: Tokenizer,
    config: ServerConfig,
    *,
    max_num_seqs: int,
    metrics: Metrics | None = None,
    tracing: Tracing | None = None,
    preparation: Preparation | None = None,
    is_stopping: Callable[[], bool] = lambda: False,
    priority_counts: bool = True,
    loras: Sequence[LoRARequest] = (),
) -> Starlette:
    """The ASGI app for an engine that runs `max_num_seqs` outputs at once.

    `metrics` are those that the engine's reports go to, if any do; `preparation` has a worker
    process, if there is one; `loras` are the adapters of the start. Raises InputError for a broken
    generation_config.json, and for keys that cannot be read.
    """
    topics = [routes, status_routes, page_routes, token_routes, pooling_routes, lora_routes]
    found = [route for topic in topics for route in topic.routes]  # looked through in this order
    if config.profiler is not None:
        found += profile_routes(config.profiler)
    app = Starlette(routes=found)
    app.router.redirect_slashes = False
    admission = Admission(max_num_seqs + config.max_num_queued_reqs, config.max_num_queued_tokens)
    model_names = config.model_names(tokenizer.folder)
    metrics = metrics or Metrics(model_names[0], config.metrics_prefix)
    metrics.watch_admission(admission)
    _check_reasoning(tokenizer, config.reasoning_parser)
    app.state.service = Service(
        client=client,
        tokenizer=tokenizer,
        model_names=model_names,
        defaults=load_defaults(tokenizer.folder),
        chat_special_tokens=config.chat_special_tokens,
        auto_tool_parser=config.auto_tool_parser,
        reasoning_parser=config.reasoning_parser,
        max_body_bytes=config.max_body_bytes,
        bodies=Budget(NUM_BODIES * config.max_body_bytes),
        admission=admission,
        preparation=preparation or Preparation(),
        metrics=metrics,
        tracing=tracing or Tracing(),
        request_timeout=config.request_timeout,
        is_stopping=is_stopping,
        priority_counts=priority_counts,
        salt_by_key=config.cache_salt_by_key,
        resets_cache=config.enable_cache_reset,
        adapters=ServedAdapters.of(loras, model_names, config.lora_folder),
    )
    add_error_handlers(app)
    keys = load_keys(config)
    if config.lora_folder is not None and not keys:
        raise InputError("--lora-folder", "expected with an API key", "give --api-key")
    # The last one added comes first.
    if config.max_requests_per_minute is not None:
        app.add_middleware(LimitRate, limit=config.max_requests_per_minute, by_key=bool(keys))
    if keys:
        app.add_middleware(RequireKey, keys=keys)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_credentials=config.allow_credentials,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-ignored-fields", "retry-after"],
        )
    app.add_middleware(CheckHead)
    app.add_middleware(NameRequests)
    app.add_middleware(CountResponses, metrics=metrics)
    if config.root_path:
        app.add_middleware(UnderPath, root=config.root_path)
    return app


def serve(engine_config: EngineConfig, config: ServerConfig, *, engine: str = ENGINE) -> int:
    """Serve until SIGINT or SIGTERM (returns 0) or until the engine dies (returns 1).

    Raises InputError when the address, the model or its tokenizer cannot be used.
    """
    return asyncio.run(_serve(engine_config, config, engine))


async def _serve(engine_config: EngineConfig, config: ServerConfig, engine: str) -> int:
    logs.configure(config.log_level, config.log_format, text="%(message)s")
    limit_logging()
    load_keys(config)
    check_tls(config)
    tracing = tracing_to(config.otlp_traces_endpoint)
    _check_adapters(engine_config, config)
    connections = Connections(
        limit=max_connections(config.max_connections, raise_descriptor_limit())
    )
    # The address first: a port in use should not show only after a long load.
    with bind(config) as listener, contextlib.ExitStack() as ends:
        ends.callback(remove, config.uds)
        ends.callback(tracing.close)
        metrics = Metrics(config.model_names(engine_config.model)[0], config.metrics_prefix)
        loading = asyncio.create_task(load(engine_config, config, engine, metrics))
        with _on_stop_signal(loading.cancel):
            try:
                tokenizer, client = await loading
            except asyncio.CancelledError:
                return 0
        worker = None
        metrics.describe_cache(engine_config)
        if engine_config.enable_lora:
            metrics.describe_adapters(engine_config.max_loras)
        try:
            worker = start_worker(client, tokenizer, config)
            stopping = threading.Event()
            app = build_app(
                client,
                tokenizer,
                config,
                max_num_seqs=engine_config.max_num_seqs,
                metrics=metrics,
                tracing=tracing,
                preparation=Preparation(worker),
                is_stopping=stopping.is_set,
                priority_counts=engine_config.scheduling_policy not in ORDER_OF_ARRIVAL,
                loras=parse_modules(engine_config.lora_modules),
            )
            # What is loaded stays. Else every full collection looks at it, for 100 ms.
            gc.freeze()
            server = _Server(
                uvicorn_config(app, connections, **_tls_options(config)),
                f"Serving {app.state.service.model_name} on",
                config.shutdown_timeout,
                stopping,
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
            gc.unfreeze()  # as in the engine's process


def _check_adapters(engine: EngineConfig, config: ServerConfig) -> None:
    """Raise InputError for what would show only after a long load."""
    loras, names = parse_modules(engine.lora_modules), config.model_names(engine.model)
    ServedAdapters.of(loras, names)
    if config.lora_folder is None:
        return
    if not engine.enable_lora:
        raise InputError("--lora-folder", "expected with --enable-lora", "give it, too")
    if not Path(config.lora_folder).is_dir():
        raise InputError("--lora-folder", f"{config.lora_folder} is not a folder")


async def load(
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
            arguments=logs.arguments(server.log_level, server.log_format),
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


def _check_reasoning(tokenizer: Tokenizer, parser: str | None) -> None:
    """Warn of a parser for reasoning where nothing says that the model reasons."""
    form = REASONING_PARSERS.get(parser)
    if form is None or form.is_implied:
        return
    if not any(map(tokenizer.is_in_template, (form.start, form.end))):
        logger.warning(
            "--reasoning-parser %s: the model's chat template has no %s, so outputs with a schema"
            " or grammar begin with it at once, without reasoning",
            parser,
            form.start,
        )


def start_worker(
    client: EngineSupervisor, tokenizer: Tokenizer, config: ServerConfig
) -> WorkerClient:
    return WorkerClient(
        Setup(
            folder=tokenizer.folder,
            names=config.model_names(tokenizer.folder),
            defaults=load_defaults(tokenizer.folder),
            max_model_len=client.max_model_len,
            vocab_size=client.vocab_size,
            chat_special_tokens=config.chat_special_tokens,
            auto_tool_parser=config.auto_tool_parser,
            reasoning_parser=config.reasoning_parser,
        ),
        logs.arguments(config.log_level, config.log_format),
    )


def _tls_options(config: ServerConfig) -> dict[str, object]:
    """uvicorn's options."""
    if config.ssl_certfile is None:
        return {}
    options = {
        name: getattr(config, name) for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
    }
    needs_client = config.ssl_ca_certs is not None
    return options | {"ssl_cert_reqs": ssl.CERT_REQUIRED if needs_client else ssl.CERT_NONE}


async def _stop_when_dead(client: EngineSupervisor, server: "_Server") -> None:
    await client.wait_until_dead()
    if not server.should_exit:
        server.stop()


class _Server(uvicorn.Server):
    """uvicorn that says when it is ready, and leaves signals and the exit code to `serve`."""

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

    def capture_signals(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        where = address(sockets[0], tls=self.config.is_ssl)
        try:
            await super().startup(sockets=sockets)
        except OSError as error:
            raise address_error(where, error) from error
        sockets[0].listen(KERNEL_QUEUE)  # beyond what is taken from it at once
        print(self._ready_line, where, flush=True)

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
            self._stopping.set()
            asyncio.get_running_loop().call_later(self._shutdown_timeout, self.stop)


def uvicorn_config(app: Starlette, connections: Connections, **options: object) -> uvicorn.Config:
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
