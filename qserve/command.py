"""Command: one row of the command line's tables. Loads no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from qserve.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One subcommand: `run` gets its argument and its settings, and returns the exit code.

    A command with `commands` has those in place of an argument and settings of its own. Without
    `argument`, `run` gets the settings alone.
    """

    help: str
    settings: tuple[type, ...] = ()
    run: Callable[..., int] | None = None
    argument: str | None = "model"
    argument_help: str = "model folder"
    # the argument may also be given as a flag of its name, as other servers' benchmarks have it
    argument_is_flag_too: bool = False
    argument_optional: bool = False
    commands: Mapping[str, "Command"] = field(default_factory=dict)

    @property
    def has_config_file(self) -> bool:
        """Whether --config FILE stands for flags: where there are many."""
        return EngineConfig in self.settings
