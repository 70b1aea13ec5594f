"""Settings per model, for a server of several models. Loads no torch."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from formats.errors import InputError
from qserve.command_line import config_file
from qserve.command_line.arguments import parse_settings
from qserve.config import EngineConfig, ServerConfig
from qserve.server.admin.settings import REFUSE
from qserve.server.models.settings import SLEEP, SPLIT

# Server settings that may differ between models. All engine settings may.
OF_A_MODEL = (
    *("served_model_name", "tool_call_parser", "reasoning_parser", "enable_auto_tool_choice"),
    *("chat_special_tokens", "structured_output_strict", "check"),
)
UTILIZATION = "gpu_memory_utilization"


class ModelConfig(NamedTuple):
    """Settings of one model."""

    engine: EngineConfig
    server: ServerConfig


def model_configs(engine: EngineConfig, server: ServerConfig) -> list[ModelConfig]:
    """Return the settings of all models, in the order of the command line. Raises InputError.

    Engines start one after the other, and an engine counts the memory of earlier engines as used.
    So with --memory-sharing split, an engine's gpu_memory_utilization includes the shares of the
    engines before it.
    """
    names = [engine.model, *server.more_models]
    own = _own_settings(server.model_settings, names)
    _check(server, names, own)
    shares = _shares(engine.gpu_memory_utilization, [own[name] for name in names])
    found, used = [], 0.0
    for name, share in zip(names, shares, strict=True):
        settings = own[name]
        used += share
        if server.memory_sharing == SPLIT and len(names) > 1:
            settings = {**settings, UTILIZATION: used}
        of_server = {key: value for key, value in settings.items() if key in OF_A_MODEL}
        of_engine = {key: value for key, value in settings.items() if key not in OF_A_MODEL}
        model = dataclasses.replace(engine, **{**of_engine, "model": name})
        of_server.setdefault("served_model_name", list(server.model_names(name)))
        found.append(ModelConfig(model, dataclasses.replace(server, **of_server)))
    _check_names(found)
    return found


def _own_settings(path: str | None, names: list[str]) -> dict[str, dict[str, Any]]:
    """Read --model-settings: return each model's settings. Raises InputError."""
    found: Mapping[str, Any] = {} if path is None else config_file.read_mapping(path)
    for name, settings in found.items():
        if name not in names:
            raise InputError(
                path,
                f"{name} is none of the models {', '.join(names)}",
                "write the name as on the command line",
            )
        if not isinstance(settings, dict | None):
            raise InputError(
                f"{path}: {name}",
                f"expected a mapping of flags to values, found {settings!r:.80}",
                "write `flag: value` lines below the model's name",
            )
    fields = {
        field.name: field
        for field in dataclasses.fields(EngineConfig)
        if field.name not in ("model", "download_dir")
    }
    fields |= {
        field.name: field for field in dataclasses.fields(ServerConfig) if field.name in OF_A_MODEL
    }
    classes = (EngineConfig, ServerConfig)
    return {
        name: parse_settings(f"{path}: {name}", found.get(name) or {}, fields, classes)
        for name in names
    }


def _check(server: ServerConfig, names: list[str], own: Mapping[str, dict[str, Any]]) -> None:
    if len(names) == 1:
        return
    if len(set(names)) < len(names):
        raise InputError("MODEL", "a model is given twice", "give each model once")
    if server.served_model_name:
        raise InputError(
            "--served-model-name", "does not work with several models", "use --model-settings"
        )
    if server.memory_sharing != SLEEP:
        return
    if server.restart_engine:
        raise InputError(
            "--restart-engine",
            "does not work with --memory-sharing sleep: a restarted engine is awake",
            "remove it, and restart the server",
        )
    if server.enable_admin_routes or server.paused_requests == REFUSE:
        flag = "--enable-admin-routes" if server.enable_admin_routes else "--paused-requests refuse"
        raise InputError(
            flag,
            "does not work with --memory-sharing sleep, which puts models to sleep",
            "remove it",
        )
    for name in names:
        if UTILIZATION in own[name]:
            raise InputError(
                f"{server.model_settings}: {name}",
                f"{UTILIZATION} is the same for all models with --memory-sharing sleep",
                "set it on the command line",
            )


def _shares(total: float, own: list[dict[str, Any]]) -> list[float]:
    """Return each model's share of the memory: its own setting, or an equal part of the rest."""
    given = [settings.get(UTILIZATION) for settings in own]
    rest = total - sum(share for share in given if share is not None)
    missing = given.count(None)
    if rest < -1e-9 or (missing and rest <= 0):
        raise InputError(
            "--gpu-memory-utilization",
            f"the models' own shares are {total - rest:g} of {total:g}",
            "lower them in --model-settings",
        )
    return [rest / missing if share is None else share for share in given]


def _check_names(models: list[ModelConfig]) -> None:
    seen: dict[str, str] = {}
    for engine, server in models:
        for name in server.served_model_name:
            if name in seen:
                raise InputError(
                    f"model name {name}",
                    f"is used for both {seen[name]} and {engine.model}",
                    "give one of them a served-model-name in --model-settings",
                )
            seen[name] = engine.model
