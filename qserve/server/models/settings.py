"""ModelsSettings: flags of a server of several models. Loads no torch."""

from dataclasses import dataclass

from qserve.command_line.setting import setting

SPLIT, SLEEP = "split", "sleep"


@dataclass(frozen=True, kw_only=True)  # no slots: a class may have one such base only
class ModelsSettings:
    """Further models, and how the models of one server share the GPU's memory."""

    more_models: list[str] = setting(
        [], "further models for this server, each in its own engine process", positional=True
    )
    model_settings: str | None = setting(
        None,
        "YAML, TOML or JSON file with settings of single models: a mapping of MODEL as typed to"
        " flags of the engine, --served-model-name and the parsers",
    )
    memory_sharing: str = setting(
        SPLIT,
        "with several models; split: each has its share of --gpu-memory-utilization; sleep: one is"
        " awake and has all of it, the weights of the others are in host memory until a request"
        " names them",
        (SPLIT, SLEEP),
    )
    model_turn_seconds: float = setting(
        5.0,
        "with --memory-sharing sleep: time for which the model that is awake takes new requests"
        " while requests for another wait",
        low=0,
    )
