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
        "YAML, TOML or JSON file with settings per model: a mapping from MODEL, written as on the"
        " command line, to engine flags, served-model-name and parsers",
    )
    memory_sharing: str = setting(
        SPLIT,
        "with several models; split: each gets a share of --gpu-memory-utilization; sleep: one"
        " model is awake and gets all of it, the others sleep with their weights in host memory"
        " until a request asks for them",
        (SPLIT, SLEEP),
    )
    model_turn_seconds: float = setting(
        5.0,
        "with --memory-sharing sleep: seconds for which the model that is awake accepts new"
        " requests while requests for another model wait",
        low=0,
    )
