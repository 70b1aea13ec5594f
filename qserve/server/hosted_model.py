"""HostedModel: the engine processes, worker processes and Service of one model of a server."""

import asyncio
import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from formats.errors import InputError
from formats.files.json_file import read_json
from qserve.config import EngineConfig, ServerConfig
from qserve.engine.ipc.client import ENGINE_NAME, Limits
from qserve.engine.ipc.start_engines import Engines, start_engines
from qserve.engine.ipc.waiting import ENGINE, WaitingEngine
from qserve.hub.local import weights_folder
from qserve.lora.request import parse_modules
from qserve.params.generation_defaults import load_defaults
from qserve.pooling.config import PoolingConfig
from qserve.pooling.scoring import score_params
from qserve.processes import logs
from qserve.server.app import chosen_parsers, make_service
from qserve.server.observability.metrics import Metrics
from qserve.server.observability.tracing import Tracing
from qserve.server.prepare.media import IN_OTHER_PROCESSES, MediaAccess
from qserve.server.prepare.preparation import Preparation
from qserve.server.prepare.worker import WorkerClient
from qserve.server.prepare.worker_messages import LoadTokenizer, Setup
from qserve.server.service import Service
from qserve.server.store.store import ResponseStore
from qserve.text.tokenizer import Tokenizer

# Policies that ignore a request's priority. A user-defined policy may use it.
ORDER_OF_ARRIVAL = ("fcfs", "prefill-first", "longest-prefix", "controlled")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedModel:
    """Processes of one model. Created by `start`, ended by `close`."""

    service: Service
    client: Engines
    preparation: Preparation
    watch: asyncio.Task  # measures the lag of the event loop

    @classmethod
    async def start(
        cls,
        engine_config: EngineConfig,
        config: ServerConfig,
        *,
        engine: str = ENGINE,
        waiting: WaitingEngine | None = None,
        store: ResponseStore | None = None,
        tracing: Tracing | None = None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> "HostedModel":
        """Load the model, in the process `waiting` if it is given. Raises InputError."""
        metrics = Metrics(config.model_names(engine_config.model)[0], config.metrics_prefix)
        tokenizer, client, preparation = await load(engine_config, config, engine, metrics, waiting)
        try:
            metrics.describe_cache(engine_config)
            if engine_config.enable_lora:
                metrics.describe_adapters(engine_config.max_loras)
            service = make_service(
                client,
                tokenizer,
                config,
                max_num_seqs=engine_config.max_num_seqs * engine_config.num_engines,
                metrics=metrics,
                tracing=tracing,
                preparation=preparation,
                is_stopping=is_stopping,
                priority_counts=engine_config.scheduling_policy not in ORDER_OF_ARRIVAL,
                loras=parse_modules(engine_config.lora_modules),
                store=store,
                weights_folder=functools.partial(weights_folder, config=engine_config),
                num_engines=engine_config.num_engines,
            )
        except BaseException:
            await client.close()
            await preparation.close()
            raise
        watch = asyncio.create_task(metrics.watch_loop())
        return cls(service=service, client=client, preparation=preparation, watch=watch)

    @property
    def is_alive(self) -> bool:
        """True if requests can run now or soon."""
        return self.client.is_alive or self.client.is_restarting

    async def close(self) -> None:
        """Stop the processes. Running requests end with an error."""
        self.watch.cancel()
        with contextlib.suppress(Exception):
            await self.client.close()
        await self.preparation.close()


async def load(
    config: EngineConfig,
    server: ServerConfig,
    engine: str,
    metrics: Metrics,
    waiting: WaitingEngine | None = None,
) -> tuple[Tokenizer, Engines, Preparation]:
    """Load the model in its engine processes; meanwhile start workers and load the tokenizer."""
    name = ENGINE_NAME
    if server.more_models:
        name += f" of {server.model_names(config.model)[0]}"
    starting = asyncio.create_task(
        start_engines(
            config,
            name=name,
            restarts=server.restart_engine,
            engine=engine,
            waiting=waiting,
            watch=metrics.take_report,
            limits=Limits(silence=server.engine_timeout, step=server.engine_step_timeout),
            on_restart=metrics.count_restart,
            arguments=logs.arguments(server.log_level, server.log_format),
            check=server.check,
        )
    )
    setup: asyncio.Future[Setup] = asyncio.get_running_loop().create_future()
    preparation = None
    try:
        tokenizer = await asyncio.to_thread(load_tokenizer, config.model, config.tokenizer)
        preparation = start_preparation(tokenizer, server, setup)
        client = await starting
        setup.set_result(make_setup(client, tokenizer, server))
        preparation.take_media(start_media_workers(client, tokenizer, server, setup.result()))
        return tokenizer, client, preparation
    except BaseException:
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError, InputError):
            await (await starting).close()
        if preparation is not None:
            await preparation.close()
        raise


def load_tokenizer(folder: str, files: str | None) -> Tokenizer:
    """Load the tokenizer; check the files of the folder that say how texts are scored.

    Raises InputError.
    """
    # A mistyped folder raises a clear error here, instead of an obscure one in transformers.
    read_json(Path(folder) / "config.json")
    tokenizer = Tokenizer(folder, files)
    pooling = PoolingConfig.from_folder(folder)
    if pooling.is_reranker:
        score_params(pooling, tokenizer)  # raises InputError for wrong score tokens
    return tokenizer


def start_preparation(
    tokenizer: Tokenizer, config: ServerConfig, setup: asyncio.Future[Setup]
) -> Preparation:
    """Start the worker processes for texts: one, and a second if the model has a chat template.

    The processes wait for `setup`.
    """
    load, arguments = _of_workers(tokenizer, config)
    renderer = WorkerClient(load, setup, arguments) if tokenizer.has_chat_template else None
    return Preparation(WorkerClient(load, setup, arguments), renderer)


def start_media_workers(
    client: Engines, tokenizer: Tokenizer, config: ServerConfig, setup: Setup
) -> list[WorkerClient]:
    """Start the worker processes for images; none if the model takes no images."""
    load, arguments = _of_workers(tokenizer, config)
    access = MediaAccess.of(client, config)
    return access.workers(load, setup, config.num_media_workers, arguments)


def _of_workers(tokenizer: Tokenizer, config: ServerConfig) -> tuple[LoadTokenizer, list[str]]:
    load = LoadTokenizer(folder=tokenizer.folder, tokenizer_folder=tokenizer.files)
    return load, logs.arguments(config.log_level, config.log_format)


def make_setup(client: Engines, tokenizer: Tokenizer, config: ServerConfig) -> Setup:
    """Collect the facts on a running engine that worker processes need."""
    parsers, access = chosen_parsers(tokenizer, config), MediaAccess.of(client, config)
    return Setup(
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
