"""Builds the server's ASGI app: routes, middleware, and the Service of each model."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware

from formats.errors import InputError
from qserve.config import ServerConfig
from qserve.lora.request import LoRARequest
from qserve.output_parsing.detection import AUTO, NONE, Parsers, model_type
from qserve.output_parsing.reasoning_formats import REASONING_PARSERS
from qserve.params.generation_defaults import load_defaults
from qserve.server.adapters import ServedAdapters
from qserve.server.admin import adapters, control, operations, status, weights
from qserve.server.admin.settings import REFUSE
from qserve.server.anthropic import routes as anthropic
from qserve.server.anthropic.errors import ConvertErrors
from qserve.server.http.api_key import Keys, RequireKey
from qserve.server.http.clients import Admission, Budget
from qserve.server.http.errors import add_error_handlers
from qserve.server.http.foreign_pages import RefuseForeignPages, hosts_of
from qserve.server.http.framing import CheckHead, NameRequests, OriginForm, UnderPath
from qserve.server.http.rate_limit import LimitRate
from qserve.server.http.route_list import CountResponses, refusing
from qserve.server.models.select import SelectModel
from qserve.server.models.turns import ModelTurns
from qserve.server.observability.metrics import Metrics
from qserve.server.observability.tracing import Tracing
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
from qserve.server.prepare.media import MediaAccess
from qserve.server.prepare.preparation import Preparation
from qserve.server.service import Client, Service
from qserve.server.store.store import ResponseStore
from qserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

NUM_BODIES = 32  # bodies of the maximum size that fit into memory at the same time
# Route table: modules with `routes`, searched in this order.
TOPICS = (
    *(completions, chat, responses, stored, anthropic, pooling, tokenize, models),
    *(status, pages),
)
OPERATOR_TOPICS = (control, adapters)  # with several models, the query names the model


def make_service(
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
    num_engines: int = 1,
) -> Service:
    """Build the Service of one model. Raises InputError.

    max_num_seqs: maximum number of outputs that the engines run concurrently
    metrics: receives the engine's reports
    preparation: worker processes; default: none
    loras: adapters of --lora-modules
    store: store of responses, see `open_store`
    media: how this process reads images, or the reason to refuse them
    weights_folder: maps a path or hub name of new weights to a local folder
    num_engines: number of engines that `client` controls

    InputError: generation_config.json is broken, or an API key file cannot be read.
    """
    admission = Admission(max_num_seqs + config.max_num_queued_reqs, config.max_num_queued_tokens)
    model_names = config.model_names(tokenizer.folder)
    metrics = metrics or Metrics(model_names[0], config.metrics_prefix)
    metrics.watch_admission(admission)
    parsers = chosen_parsers(tokenizer, config)
    for report in parsers.reports:
        logger.info("%s", report)
    if config.reasoning_parser != AUTO:
        _check_reasoning(tokenizer, parsers.reasoning)
    return Service(
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
        keys=Keys(config),
        weights_folder=weights_folder,
        refuses_paused=config.paused_requests == REFUSE,
        has_admin_routes=config.enable_admin_routes,
        num_engines=num_engines,
    )


def check_keys(config: ServerConfig, keys: Keys) -> None:
    """Raise InputError for settings without the API key that they need."""
    if keys:
        return
    for flag, is_set in (
        ("--enable-admin-routes", config.enable_admin_routes),
        ("--lora-folder", config.lora_folder is not None),
    ):
        if is_set:
            raise InputError(flag, "requires an API key", "add --api-key or --api-key-file")


def app_of(
    services: Sequence[Service], config: ServerConfig, *, turns: ModelTurns | None = None
) -> Starlette:
    """Build the ASGI app for one or several models. Requests choose a model by the field `model`.

    `turns`: scheduler of models with --memory-sharing sleep. Raises InputError if a setting
    requires an API key and there is none.
    """
    keys = services[0].keys
    found = [route for topic in TOPICS for route in topic.routes]
    of_operators = [route for topic in OPERATOR_TOPICS for route in topic.routes]
    if config.profiler is not None:
        of_operators += control.profile_routes(config.profiler)
    check_keys(config, keys)
    if config.enable_admin_routes:
        of_operators += [*operations.routes, *weights.routes]
    else:
        reason = "This server was started without --enable-admin-routes."
        remedy = "Restart it with this flag."
        found += refusing([*operations.routes, *weights.routes], reason, remedy)
    app = Starlette(routes=[*found, *of_operators])
    app.router.redirect_slashes = False
    app.state.service, app.state.services = services[0], tuple(services)
    add_error_handlers(app)
    # The middleware added last runs first.
    if len(services) > 1:
        paths = frozenset(route.path for route in of_operators)
        app.add_middleware(SelectModel, services=services, operator_paths=paths, turns=turns)
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
    app.add_middleware(CountResponses, metrics=services[0].metrics)
    if config.root_path:
        app.add_middleware(UnderPath, root=config.root_path)
    app.add_middleware(OriginForm)
    return app


def build_app(
    client: Client, tokenizer: Tokenizer, config: ServerConfig, **options: Any
) -> Starlette:
    """Build the ASGI app of one model. `options` are passed to `make_service`."""
    return app_of([make_service(client, tokenizer, config, **options)], config)


def open_store(config: ServerConfig) -> ResponseStore | None:
    """Open the store of --response-store; None if the flag is not set. Raises InputError."""
    if config.response_store is None:
        return None
    return ResponseStore(
        config.response_store,
        max_bytes=config.response_store_bytes,
        max_days=config.response_store_days,
    )


def chosen_parsers(tokenizer: Tokenizer, config: ServerConfig) -> Parsers:
    """Choose the parsers of tool calls (for tool_choice auto) and of reasoning."""
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
