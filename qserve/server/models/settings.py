"""ModelsSettings: flags for serving several models. Loads no torch."""

from dataclasses import dataclass

from qserve.command_line.setting import setting

SPLIT, SLEEP = "split", "sleep"


@dataclass(frozen=True, kw_only=True)  # no slots: of several base classes only one may have slots
class ModelsSettings:
    """More models, and how the models of one server share GPU memory."""

    more_models: list[str] = setting(
        [], "more models to serve, each in its own engine process", positional=True
    )
    model_settings: str | None = setting(
        None,
        "YAML, TOML or JSON file with settings per model; it maps MODEL, written as on the command"
        " line, to engine flags, served-model-name and parsers",
    )
    memory_sharing: str = setting(
        SPLIT,
        "GPU memory of several models; split: each gets a share of --gpu-memory-utilization; sleep:"
        " one model at a time is awake and gets all of it, and the others keep their weights in"
        " host memory until a request needs them",
        (SPLIT, SLEEP),
    )
    model_turn_seconds: float = setting(
        5.0,
        "with --memory-sharing sleep: seconds for which the awake model accepts new requests while"
        " another model has waiting requests",
        low=0,
    )
