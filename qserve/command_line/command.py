"""Command: one row of a table of subcommands. Loads no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from qserve.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One subcommand. `run` is called with the argument and the settings; it returns the exit code.

    If `argument` is None, `run` gets only the settings. A command with `commands` has subcommands
    instead of an argument and settings.
    """

    help: str
    settings: tuple[type, ...] = ()
    run: Callable[..., int] | None = None
    argument: str | None = "model"
    argument_help: str = "model folder, or hub name ORG/NAME"
    # The argument may also be given as a flag of the same name, as in vLLM.
    argument_is_flag_too: bool = False
    argument_optional: bool = False
    commands: Mapping[str, "Command"] = field(default_factory=dict)

    @property
    def has_config_file(self) -> bool:
        """True if the command has --config FILE; commands with engine flags do."""
        return EngineConfig in self.settings
