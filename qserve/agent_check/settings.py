"""Settings of `qserve agent-check`. Loads no torch."""

from dataclasses import dataclass

from formats.errors import InputError
from qserve.command_line.setting import check_settings, setting
from qserve.errors import LEAVE_OUT

APIS = ("chat", "responses", "messages")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCheckConfig:
    """Settings of `qserve agent-check`."""

    forced: bool = setting(
        False,
        "force the tool calls of every task: this checks only the server, and any model passes;"
        " without this flag the model must choose the right tools",
    )
    api: list[str] = setting([], f"APIs to check, of {', '.join(APIS)}; default: all", many=True)
    task: list[str] = setting(
        [], "tasks to run, by their names in the table of results; default: all", many=True
    )
    model_name: str | None = setting(None, "name of the model; default: the server's first")
    api_key: str | None = setting(
        None,
        "API key of the server; default: QSERVE_API_KEY or OPENAI_API_KEY from the environment",
    )
    max_tokens: int = setting(512, "maximum number of tokens in a reply", low=16)
    server_args: str = setting(
        "", 'flags of `qserve serve`, if TARGET is a model folder; such as "--device cpu"'
    )
    json: bool = setting(False, "print the results as JSON")

    def __post_init__(self) -> None:
        check_settings(self)
        for name in self.api:
            if name not in APIS:
                raise InputError(
                    "--api", f"expected some of {', '.join(APIS)}, found {name!r}", LEAVE_OUT
                )
