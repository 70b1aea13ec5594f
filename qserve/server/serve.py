"""`serve`: runs the HTTP server, and the engine and worker processes of its models."""

import asyncio
import contextlib
import gc
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from formats.errors import InputError
from qserve.config import EngineConfig, ServerConfig
from qserve.engine.ipc.start_engines import Engines
from qserve.engine.ipc.waiting import ENGINE, WaitingEngine
from qserve.hub.local import local_config
from qserve.lora.request import parse_modules
from qserve.processes import logs
from qserve.processes.descriptors import raise_descriptor_limit
from qserve.processes.log_limit import limit_logging
from qserve.server.adapters import ServedAdapters
from qserve.server.admin.reload import on_hangup
from qserve.server.app import app_of, check_keys, open_store
from qserve.server.hosted_model import HostedModel
from qserve.server.http.api_key import Keys
from qserve.server.http.http_protocol import Connections, max_connections
from qserve.server.http.listener import bind, check_tls, owned_path, remove
from qserve.server.models.configs import ModelConfig, model_configs
from qserve.server.models.settings import SLEEP
from qserve.server.models.turns import ModelTurns, fall_asleep
from qserve.server.observability.tracing import Tracing, tracing_to
from qserve.server.prepare.preparation import Preparation
from qserve.server.store.store import ResponseStore
from qserve.server.web_server import DRAIN_SECONDS, WebServer, tls_options, uvicorn_config

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(
    engine_config: EngineConfig,
    config: ServerConfig,
    *,
    engine: str = ENGINE,
    waiting: WaitingEngine | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM (returns 0) or until an engine dies (returns 1).

    Models of the hub are downloaded first, and served under their hub names. `waiting`: the process
    for the first model that is loaded; None: it is started here. Raises InputError if the address,
    a model or a tokenizer cannot be used.
    """
    models = model_configs(engine_config, config)
    for each in models:
        _check_adapters(each.engine, each.server)
    models = [each._replace(engine=local_config(each.engine)) for each in models]
    return asyncio.run(_serve(models, config, engine, waiting))


async def _serve(
    models: Sequence[ModelConfig],
    config: ServerConfig,
    engine: str,
    waiting: WaitingEngine | None,
) -> int:
    logs.configure(config.log_level, config.log_format, text="%(message)s")
    limit_logging()
    check_keys(config, Keys(config))  # before a model is loaded
    check_tls(config)
    tracing = tracing_to(config.otlp_traces_endpoint)
    connections = Connections(
        limit=max_connections(config.max_connections, raise_descriptor_limit())
    )
    stopping = threading.Event()
    # Bind first, so that a port in use is reported before a model is loaded.
    with contextlib.ExitStack() as ends:
        ends.enter_context(owned_path(config.uds))
        listener = ends.enter_context(bind(config))
        ends.callback(remove, config.uds)
        ends.callback(tracing.close)
        have_loaded = ends.enter_context(on_hangup())
        store = open_store(config)
        if store is not None:
            ends.callback(store.close)
        loading = asyncio.create_task(
            _load(models, engine, waiting, store, tracing, stopping.is_set)
        )
        with _on_stop_signal(loading.cancel):
            try:
                hosted = await loading
            except asyncio.CancelledError:
                return 0
        try:
            services = [each.service for each in hosted]
            turns = None
            if models[0].server.memory_sharing == SLEEP and len(hosted) > 1:
                turns = ModelTurns([each.client for each in hosted], config.model_turn_seconds)
            app = app_of(services, config, turns=turns)
            # Exclude loaded objects from garbage collection; scanning them takes 100 ms.
            gc.freeze()
            server = WebServer(
                uvicorn_config(app, connections, **tls_options(config)),
                f"Serving {', '.join(each.model_name for each in services)} on",
                config.shutdown_timeout,
                stopping,
            )
            have_loaded(services)
            with _on_stop_signal(server.stop):
                watches = [asyncio.create_task(_stop_when_dead(e.client, server)) for e in hosted]
                for each in hosted:
                    await _until_ready(each.preparation, server)
                await server.serve(sockets=[listener])
                for watch in watches:
                    watch.cancel()
            code = 0 if all(each.is_alive for each in hosted) else 1
            await asyncio.gather(*(each.client.close() for each in hosted))
            await server.finish_replies()
            return code
        finally:
            for each in hosted:
                await each.close()
            gc.unfreeze()  # as in the engine's process


async def _load(
    models: Sequence[ModelConfig],
    engine: str,
    waiting: WaitingEngine | None,
    store: ResponseStore | None,
    tracing: Tracing,
    is_stopping: Callable[[], bool],
) -> list[HostedModel]:
    """Load the models one after the other. With --memory-sharing sleep only the first is awake."""
    loaded: list[HostedModel] = []
    awake = ""  # the model that was loaded last
    takes_turns = models[0].server.memory_sharing == SLEEP
    try:
        for each in reversed(models) if takes_turns else models:
            if takes_turns and loaded:
                await fall_asleep(loaded[-1].client, awake)
            awake = each.engine.model
            if len(models) > 1:
                logger.info("Loading %s", awake)
            loaded.append(
                await HostedModel.start(
                    each.engine,
                    each.server,
                    engine=engine,
                    waiting=None if loaded else waiting,
                    store=store,
                    tracing=tracing,
                    is_stopping=is_stopping,
                )
            )
    except BaseException:
        for each in loaded:
            await each.close()
        raise
    return loaded[::-1] if takes_turns else loaded


def _check_adapters(engine: EngineConfig, config: ServerConfig) -> None:
    """Check the adapter settings before the model is loaded. Raises InputError."""
    loras, names = parse_modules(engine.lora_modules), config.model_names(engine.model)
    ServedAdapters.of(loras, names)
    if config.lora_folder is None:
        return
    if not engine.enable_lora:
        raise InputError("--lora-folder", "requires --enable-lora", "add the flag")
    if not Path(config.lora_folder).is_dir():
        raise InputError(
            "--lora-folder",
            f"{config.lora_folder} is not a folder",
            "create it, or name another",
        )


async def _stop_when_dead(client: Engines, server: WebServer) -> None:
    await client.wait_until_dead()
    if not server.is_stopping:
        server.stop()


async def _until_ready(preparation: Preparation, server: WebServer) -> None:
    """Wait until the worker processes are ready, or the server stops."""
    ready = asyncio.create_task(preparation.ready())
    while not (ready.done() or server.is_stopping):
        await asyncio.wait([ready], timeout=DRAIN_SECONDS)
    if not ready.done():
        ready.cancel()
    elif ready.exception() is not None:
        logger.error("A worker process failed to start: %s", ready.exception())


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
