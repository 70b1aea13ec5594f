"""The whole server: the ASGI app, and `serve`, which runs it and its engine process."""

import asyncio
import contextlib
import dataclasses
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
from qserve.config import EngineConfig, ServerConfig
from qserve.engine.ipc.client import Limits
from qserve.engine.ipc.process import ENGINE
from qserve.engine.ipc.supervisor import EngineSupervisor
from qserve.hub.local import local_config, weights_folder
from qserve.lora.request import LoRARequest, parse_modules
from qserve.output_parsing.detection import AUTO, NONE, Parsers, model_type
from qserve.output_parsing.reasoning_formats import REASONING_PARSERS
from qserve.params.generation_defaults import load_defaults
from qserve.processes import logs
from qserve.processes.log_limit import limit_logging
from qserve.server.adapters import ServedAdapters
from qserve.server.admin import adapters, control, operations, status
from qserve.server.admin.reload import on_hangup
from qserve.server.admin.settings import REFUSE
from qserve.server.anthropic import routes as anthropic
from qserve.server.anthropic.errors import ConvertErrors
from qserve.server.http.admission import Admission
from qserve.server.http.api_key import Keys, RequireKey
from qserve.server.http.budget import Budget
from qserve.server.http.errors import add_error_handlers
from qserve.server.http.foreign_pages import RefuseForeignPages, hosts_of
from qserve.server.http.framing import CheckHead, OriginForm, UnderPath
from qserve.server.http.http_protocol import (
    ACCEPTED_AT_ONCE,
    KERNEL_QUEUE,
    Connections,
    HttpProtocol,
    max_connections,
    raise_descriptor_limit,
)
from qserve.server.http.listener import address, address_error, bind, check_tls, remove
from qserve.server.http.rate_limit import LimitRate
from qserve.server.http.request_id import NameRequests
from qserve.server.observability.metrics import Metrics
from qserve.server.observability.response_count import CountResponses
from qserve.server.observability.tracing import Tracing, tracing_to
from qserve.server.openai import (
    chat,
    completions,
    models,
    pooling,
    responses,
    stored,
    tokenize,
)
from qserve.server.page import routes as pages
from qserve.server.prepare.media import IN_OTHER_PROCESSES, MediaAccess
from qserve.server.prepare.preparation import Preparation
from qserve.server.prepare.worker import WorkerClient
from qserve.server.prepare.worker_messages import Setup
from qserve.server.service import Client, Service
from qserve.server.store.store import ResponseStore
from qserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

NUM_BODIES = 32  # bodies of the maximum size that fit into memory at the same time
# Policies that ignore a request's priority; a policy of the user's own may use it.
ORDER_OF_ARRIVAL = ("fcfs", "prefill-first", "longest-prefix", "controlled")
DRAIN_SECONDS = 0.05  # polling interval while the server stops
REPLY_GRACE = 1  # seconds for clients to read the error of an aborted request
# Route table: modules with `routes`, searched in this order.
TOPICS = (
    *(completions, chat, responses, stored, anthropic, pooling, tokenize, models),
    *(status, control, adapters, pages),
)
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
    store: ResponseStore | None = None,
    media: MediaAccess = MediaAccess(None),  # noqa: B008  # immutable
    weights_folder: Callable[[str], str] = str,
) -> Starlette:
    """Build the ASGI app for an engine that runs up to `max_num_seqs` outputs concurrently.

    `metrics` receives the engine's reports. `preparation` has the worker processes; by default
    there are none. `loras`: adapters loaded at start-up. `store`: see `open_store`.
    `media`: what is done with images where no worker process takes them. `weights_folder`: makes
    a local folder of the path or hub name of new weights. Raises InputError for a broken
    generation_config.json and for unreadable keys.
    """
    found = [route for topic in TOPICS for route in topic.routes]
    if config.profiler is not None:
        found += control.profile_routes(config.profiler)
    keys = Keys(config)
    if config.enable_admin_routes:
        if not keys:
            raise InputError("--enable-admin-routes", "requires an API key", "add --api-key")
        found += operations.routes
    app = Starlette(routes=found)
    app.router.redirect_slashes = False
    admission = Admission(max_num_seqs + config.max_num_queued_reqs, config.max_num_queued_tokens)
    model_names = config.model_names(tokenizer.folder)
    metrics = metrics or Metrics(model_names[0], config.metrics_prefix)
    metrics.watch_admission(admission)
    parsers = chosen_parsers(tokenizer, config)
    for report in parsers.reports:
        logger.info("%s", report)
    if config.reasoning_parser != AUTO:
        _check_reasoning(tokenizer, parsers.reasoning)
    app.state.service = Service(
        client=client,
        tokenizer=tokenizer,
        model_names=model_names,
        defaults=load_defaults(tokenizer.folder),
        chat_special_tokens=config.chat_special_tokens,
        auto_tool_parser=parsers.tool_calls,
        reasoning_parser=parsers.reasoning,
        structured_output_strict=config.structured_output_strict,
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
        store=store,
        media=media.reader(tokenizer),
        without_media=media.refusal,
        keys=keys,
        weights_folder=weights_folder,
        refuses_paused=config.paused_requests == REFUSE,
    )
    add_error_handlers(app)
    if config.lora_folder is not None and not keys:
        raise InputError("--lora-folder", "requires an API key", "add --api-key")
    # The middleware added last runs first.
    if config.max_requests_per_minute is not None:
        app.add_middleware(LimitRate, limit=config.max_requests_per_minute, by_key=bool(keys))
    if keys:
        app.add_middleware(RequireKey, keys=keys)
    else:
        origins = config.allowed_origins
        app.add_middleware(RefuseForeignPages, hosts=hosts_of(config), origins=origins)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_credentials=config.allow_credentials,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "x-ignored-fields", "retry-after"],
        )
    app.add_middleware(CheckHead)
    app.add_middleware(ConvertErrors)
    app.add_middleware(NameRequests)
    app.add_middleware(CountResponses, metrics=metrics)
    if config.root_path:
        app.add_middleware(UnderPath, root=config.root_path)
    app.add_middleware(OriginForm)
    return app


def open_store(config: ServerConfig) -> ResponseStore | None:
    """Open the store of --response-store, if it is set. Raises InputError."""
    if config.response_store is None:
        return None
    return ResponseStore(
        config.response_store,
        max_bytes=config.response_store_bytes,
        max_days=config.response_store_days,
    )


def serve(engine_config: EngineConfig, config: ServerConfig, *, engine: str = ENGINE) -> int:
    """Serve until SIGINT or SIGTERM (returns 0) or until the engine dies (returns 1).

    A model of the hub is downloaded first, and served under its name there. Raises InputError when
    the address, the model or its tokenizer cannot be used.
    """
    names = list(config.model_names(engine_config.model))
    config = dataclasses.replace(config, served_model_name=names)
    _check_adapters(engine_config, config)
    return asyncio.run(_serve(local_config(engine_config), config, engine))


async def _serve(engine_config: EngineConfig, config: ServerConfig, engine: str) -> int:
    logs.configure(config.log_level, config.log_format, text="%(message)s")
    limit_logging()
    Keys(config)
    check_tls(config)
    tracing = tracing_to(config.otlp_traces_endpoint)
    connections = Connections(
        limit=max_connections(config.max_connections, raise_descriptor_limit())
    )
    # Bind first, so that a port in use is reported before the model is loaded.
    with bind(config) as listener, contextlib.ExitStack() as ends:
        ends.callback(remove, config.uds)
        ends.callback(tracing.close)
        store = open_store(config)
        if store is not None:
            ends.callback(store.close)
        metrics = Metrics(config.model_names(engine_config.model)[0], config.metrics_prefix)
        loading = asyncio.create_task(load(engine_config, config, engine, metrics))
        with _on_stop_signal(loading.cancel):
            try:
                tokenizer, client = await loading
            except asyncio.CancelledError:
                return 0
        preparation = None
        metrics.describe_cache(engine_config)
        if engine_config.enable_lora:
            metrics.describe_adapters(engine_config.max_loras)
        try:
            preparation = start_preparation(client, tokenizer, config)
            stopping = threading.Event()
            app = build_app(
                client,
                tokenizer,
                config,
                max_num_seqs=engine_config.max_num_seqs,
                metrics=metrics,
                tracing=tracing,
                preparation=preparation,
                is_stopping=stopping.is_set,
                priority_counts=engine_config.scheduling_policy not in ORDER_OF_ARRIVAL,
                loras=parse_modules(engine_config.lora_modules),
                store=store,
                weights_folder=functools.partial(weights_folder, config=engine_config),
            )
            # Exclude loaded objects from garbage collection; scanning them takes 100 ms.
            gc.freeze()
            server = _Server(
                uvicorn_config(app, connections, **_tls_options(config)),
                f"Serving {app.state.service.model_name} on",
                config.shutdown_timeout,
                stopping,
            )
            with _on_stop_signal(server.stop), on_hangup(app.state.service):
                watches = [
                    asyncio.create_task(_stop_when_dead(client, server)),
                    asyncio.create_task(metrics.watch_loop()),
                ]
                await _until_ready(preparation, server)
                await server.serve(sockets=[listener])
                for watch in watches:
                    watch.cancel()
            code = 0 if client.is_alive or client.is_restarting else 1
            await client.close()
            await server.finish_replies()
            return code
        finally:
            await client.close()
            if preparation is not None:
                await preparation.close()
            gc.unfreeze()  # as in the engine's process


def _check_adapters(engine: EngineConfig, config: ServerConfig) -> None:
    """Check the adapter settings before the model is loaded. Raises InputError."""
    loras, names = parse_modules(engine.lora_modules), config.model_names(engine.model)
    ServedAdapters.of(loras, names)
    if config.lora_folder is None:
        return
    if not engine.enable_lora:
        raise InputError("--lora-folder", "requires --enable-lora", "add the flag")
    if not Path(config.lora_folder).is_dir():
        raise InputError("--lora-folder", f"{config.lora_folder} is not a folder")


async def load(
    config: EngineConfig, server: ServerConfig, engine: str, metrics: Metrics
) -> tuple[Tokenizer, EngineSupervisor]:
    """Load the tokenizer here and the model in the engine process, in parallel."""
    starting = asyncio.create_task(
        EngineSupervisor.start(
            config,
            restarts=server.restart_engine,
            engine=engine,
            watch=metrics.take_report,
            limits=Limits(silence=server.engine_timeout, step=server.engine_step_timeout),
            on_restart=metrics.count_restart,
            arguments=logs.arguments(server.log_level, server.log_format),
            check=server.check,
        )
    )
    try:
        tokenizer = await asyncio.to_thread(_load_tokenizer, config.model, config.tokenizer)
        return tokenizer, await starting
    except BaseException:
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError, InputError):
            await (await starting).close()
        raise


def _load_tokenizer(folder: str, files: str | None) -> Tokenizer:
    from formats.checkpoint import CONFIG, read_json  # loads torch, while the engine loads too

    # A mistyped folder gets a clear error here, not one from inside the tokenizer.
    read_json(Path(folder) / CONFIG)
    return Tokenizer(folder, files)


def chosen_parsers(tokenizer: Tokenizer, config: ServerConfig) -> Parsers:
    """Parsers of tool calls that the model may choose to make, and of its reasoning."""
    return Parsers.chosen(
        config.tool_call_parser if config.enable_auto_tool_choice else NONE,
        config.reasoning_parser,
        template=tokenizer.template_text,
        model_type=model_type(tokenizer.folder),
    )


def _check_reasoning(tokenizer: Tokenizer, parser: str | None) -> None:
    """Warn about a reasoning parser whose markers are not in the chat template."""
    form = REASONING_PARSERS.get(parser)
    if form is None or form.is_implied:
        return
    if not any(map(tokenizer.is_in_template, (form.start, form.end))):
        logger.warning(
            "--reasoning-parser %s: the model's chat template lacks %s, so outputs with a"
            " schema or grammar start without reasoning",
            parser,
            form.start,
        )


def start_preparation(
    client: EngineSupervisor, tokenizer: Tokenizer, config: ServerConfig
) -> Preparation:
    """Start the worker processes: one, one more if the model has a chat template, and those that
    take images if the model does.
    """
    parsers, access = chosen_parsers(tokenizer, config), MediaAccess.of(client, config)
    setup = Setup(
        folder=tokenizer.folder,
        tokenizer_folder=tokenizer.files,
        names=config.model_names(tokenizer.folder),
        defaults=load_defaults(tokenizer.folder),
        max_model_len=client.max_model_len,
        vocab_size=client.vocab_size,
        chat_special_tokens=config.chat_special_tokens,
        auto_tool_parser=parsers.tool_calls,
        reasoning_parser=parsers.reasoning,
        structured_output_strict=config.structured_output_strict,
        without_media=access.refusal if access.limits is None else IN_OTHER_PROCESSES,
    )
    arguments = logs.arguments(config.log_level, config.log_format)
    renderer = WorkerClient(setup, arguments) if tokenizer.has_chat_template else None
    media = access.workers(setup, config.num_media_workers, arguments)
    return Preparation(WorkerClient(setup, arguments), renderer, media)


def _tls_options(config: ServerConfig) -> dict[str, object]:
    """uvicorn's TLS options."""
    if config.ssl_certfile is None:
        return {}
    options = {
        name: getattr(config, name) for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
    }
    needs_client = config.ssl_ca_certs is not None
    return options | {"ssl_cert_reqs": ssl.CERT_REQUIRED if needs_client else ssl.CERT_NONE}


async def _stop_when_dead(client: EngineSupervisor, server: "_Server") -> None:
    await client.wait_until_dead()
    if not server.is_stopping:
        server.stop()


async def _until_ready(preparation: Preparation, server: "_Server") -> None:
    """Wait until chats can be rendered or the server stops."""
    ready = asyncio.create_task(preparation.ready())
    while not (ready.done() or server.is_stopping):
        await asyncio.wait([ready], timeout=DRAIN_SECONDS)
    if not ready.done():
        ready.cancel()
    elif ready.exception() is not None:
        logger.error("A worker process failed to start: %s", ready.exception())


class _Server(uvicorn.Server):
    """uvicorn server that prints a ready line; `serve` handles signals and the exit code."""

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
        if self.is_stopping:
            self.should_exit = self.force_exit = True
        else:
            self._stopping.set()
            self._draining = asyncio.create_task(self._drain())
            asyncio.get_running_loop().call_later(self._shutdown_timeout, self.stop)

    async def _drain(self) -> None:
        while self.server_state.tasks:
            await asyncio.sleep(DRAIN_SECONDS)
        self.should_exit = True


def uvicorn_config(app: Starlette, connections: Connections, **options: object) -> uvicorn.Config:
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
