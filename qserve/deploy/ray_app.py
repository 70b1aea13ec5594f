"""Ray Serve application: build deployments from settings, and run `qserve serve --backend ray`.

`build` is the entry point for a Serve config file (`import_path: qserve.deploy.ray_app:build`).
"""

import contextlib
import dataclasses
import logging
import signal
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, HTTPOptions, ProxyLocation, RequestRouterConfig
from ray.serve.deployment import Application
from ray.serve.exceptions import RayServeException

from formats.errors import InputError, one_line
from formats.hub.fetch import local_path
from qserve.config import EngineConfig, ServerConfig
from qserve.deploy.ray_gateway import Gateway
from qserve.deploy.ray_replica import EngineReplica, multiplexing
from qserve.deploy.ray_router import ROUTER_PATHS
from qserve.deploy.settings import DeploySettings
from qserve.engine.ipc.waiting import ENGINE
from qserve.hub.local import local_config

APP = "qserve"
TARGET_SHARE = 0.8  # default of --target-ongoing-requests, as a fraction of --max-num-seqs
HEALTH_SECONDS, HEALTH_TIMEOUT = 5.0, 30.0
QUIET = {"enable_access_log": False}  # the access log writes two lines for each request
ARGUMENTS = {"engine": EngineConfig, "server": ServerConfig, "replicas": DeploySettings}
# Flags of the server's listener, which Ray's proxy replaces
NOT_WITH_RAY = ("uds",)

logger = logging.getLogger(__name__)


def build(arguments: Mapping[str, Any]) -> Application:
    """Build an application from the `args` of a Serve config file. Raises InputError.

    `arguments`: {"model": FOLDER, "engine": {...}, "server": {...}, "replicas": {...}}, with the
    names of flags, in underscores, as keys.
    """
    unknown = arguments.keys() - {"model", *ARGUMENTS}
    if unknown or not isinstance(arguments.get("model"), str):
        raise InputError(
            "args",
            f"expected model and optionally {', '.join(ARGUMENTS)}, found {dict(arguments)}",
            "add model to args in the application's YAML file",
        )
    settings = {}
    for name, kind in ARGUMENTS.items():
        values = dict(arguments.get(name) or {})
        values |= {"model": arguments["model"]} if name == "engine" else {}
        values |= {"backend": "ray"} if name == "replicas" else {}
        fields = {each.name for each in dataclasses.fields(kind)}
        if values.keys() - fields:
            wrong = ", ".join(sorted(values.keys() - fields))
            raise InputError(
                f"args {name}",
                f"has unknown keys: {wrong}",
                "remove them, or write the names of `qserve serve`'s flags with _",
            )
        settings[name] = kind(**values)
    return application(settings["engine"], settings["server"], settings["replicas"])


def application(
    engine: EngineConfig,
    server: ServerConfig,
    settings: DeploySettings,
    *,
    engine_class: str = ENGINE,
) -> Application:
    """Build the gateway and the replicas. Raises InputError for a folder without a model."""
    if server.enable_admin_routes:  # a request would reach one of several engines
        raise InputError(
            "--enable-admin-routes",
            "is not available with --backend ray",
            "remove the flag, or remove --backend ray",
        )
    first = server.model_names(engine.model)[0]
    # All nodes need the files at the same paths: in a shared folder, or in a cache on each node.
    engine = local_config(engine)
    models = {first: engine.model}
    for name, model in settings.other_models.items():
        models[name] = local_path(model, download_dir=engine.download_dir)
    for name, folder in models.items():
        if not (Path(folder) / "config.json").is_file():
            raise InputError(f"{name}: {folder}", "has no config.json", "use a model folder")
    # Absolute paths, because actors have other working directories.
    models = {name: str(Path(folder).resolve()) for name, folder in models.items()}
    if len(models) == 1 and not server.served_model_name:
        server = dataclasses.replace(server, served_model_name=[first])
    most = engine.max_num_seqs + server.max_num_queued_reqs
    replicas = serve.deployment(
        EngineReplica if len(models) == 1 else multiplexing(settings.models_per_replica),
        name="replica",
        max_ongoing_requests=most,
        ray_actor_options={"num_cpus": 1, "num_gpus": gpus_of(engine, settings)},
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=settings.drain_timeout,
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=HEALTH_TIMEOUT,
        logging_config=QUIET,
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER_PATHS[settings.router]
        ),
        **_numbers(engine, settings),
    )
    bound = replicas.bind(
        models, engine, server, drain_timeout=settings.drain_timeout, engine_class=engine_class
    )
    gateway = serve.deployment(
        Gateway,
        name="gateway",
        num_replicas=1,
        max_ongoing_requests=most * (settings.max_replicas or settings.replicas),
        ray_actor_options={"num_cpus": 0},
        logging_config=QUIET,
        graceful_shutdown_timeout_s=settings.drain_timeout,
    )
    return gateway.bind(bound, tuple(models), server)


def _numbers(engine: EngineConfig, settings: DeploySettings) -> dict[str, Any]:
    """Return Ray's settings for a fixed number of replicas, or for autoscaling by load."""
    if settings.max_replicas is None:
        return {"num_replicas": settings.replicas}
    target = settings.target_ongoing_requests or max(1, int(TARGET_SHARE * engine.max_num_seqs))
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=settings.replicas,
            max_replicas=settings.max_replicas,
            initial_replicas=settings.replicas,
            target_ongoing_requests=target,
        )
    }


def gpus_of(engine: EngineConfig, settings: DeploySettings) -> float:
    """Return the number of GPUs that a replica requests from Ray."""
    if settings.gpus_per_replica is not None:
        return settings.gpus_per_replica
    if engine.device == "cpu":
        return 0
    if engine.device == "cuda":
        return engine.num_ranks * engine.num_engines
    has_gpus = ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0
    return engine.num_ranks * engine.num_engines if has_gpus else 0


def serve_on_ray(
    engine: EngineConfig,
    server: ServerConfig,
    settings: DeploySettings,
    *,
    engine_class: str = ENGINE,
) -> int:
    """Serve until SIGINT or SIGTERM. Raises InputError if the service cannot start."""
    for name in NOT_WITH_RAY:
        if getattr(server, name) is not None:
            raise InputError(
                f"--{name}", "is not available with --backend ray", "remove one of the two flags"
            )
    port = server.port or _free_port(server.host)
    try:
        # No dashboard: everyone who can reach it can run code.
        address = settings.ray_address or "local"
        if address == "local":
            ray.init(address=address, include_dashboard=False)
        else:
            ray.init(address=address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(
            "--ray-address",
            f"cannot connect to Ray: {one_line(error)}",
            "start a cluster there, or remove the flag",
        ) from error
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):  # after Ray, which installs its own handlers
        signal.signal(number, lambda *_: stopping.set())
    try:
        app = application(engine, server, settings, engine_class=engine_class)
        serve.start(
            proxy_location=ProxyLocation.HeadOnly,
            http_options=HTTPOptions(
                host=server.host,
                port=port,
                root_path=server.root_path,
                ssl_certfile=server.ssl_certfile,
                ssl_keyfile=server.ssl_keyfile,
                ssl_ca_certs=server.ssl_ca_certs,
            ),
        )
        try:
            serve.run(app, name=APP, route_prefix="/")
        except RuntimeError as error:
            raise InputError(
                engine.model, _reason(error), "the replica's log in Ray's dashboard has the details"
            ) from error
        scheme = "https" if server.ssl_certfile else "http"
        name = server.model_names(engine.model)[0]
        print(f"Serving {name} on {scheme}://{server.host}:{port}", flush=True)
        stopping.wait()
        return 0
    finally:
        if address == "local":
            serve.shutdown()
        else:  # other applications may run on this cluster
            with contextlib.suppress(RayServeException):  # it may not have started
                serve.delete(APP)
        ray.shutdown()


def _reason(error: BaseException) -> str:
    """Return why a replica failed: the last error line of the traceback that Ray quotes."""
    lines = [line.strip() for line in str(error).splitlines() if "Error:" in line]
    return (lines[-1].partition("Error: ")[2] if lines else one_line(error))[:500]


def _free_port(host: str) -> int:
    """Return a free port, because Ray does not accept port 0."""
    with socket.socket() as listener:
        listener.bind((host, 0))
        return listener.getsockname()[1]
