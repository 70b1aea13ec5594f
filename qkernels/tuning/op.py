"""Description of an operation for the tuning table and its search.

Each operation's folder has a `tuned.py` with its own TunedOp.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from qkernels.gpu.config import power_of_two

Config = object  # a frozen dataclass of launch numbers
Key = tuple[object, ...]
Problem = dict[str, object]


def bucket(count: int) -> int:
    """The largest count that shares a row with this one: powers of two."""
    return power_of_two(count)


def one_field(config: Config, name: str, value: object) -> Iterator[Config]:
    """The config with another value in one field."""
    if getattr(config, name) != value:
        yield dataclasses.replace(config, **{name: value})


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSpace:
    """The configs of one kernel variant."""

    fault: Callable[
        ..., str | None
    ]  # of a config and a problem's fields: why it cannot run, or None
    options: dict[str, tuple[object, ...]]  # values that a search tries, one field at a time
    # configs with one option changed, and what must follow it
    changed: Callable[[Config, str, object], Iterator[Config]] = one_field
    # (config, widest problem, SMs): whether a GPU of so many SMs runs it
    fits: Callable[[Config, Problem, int], bool] = lambda config, problem, sm_count: True


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedOp:
    """An operation with measured configs: how rows are found, and how better ones are searched.

    A row is found by what the problem is (`exact`) and by how large it is (`bucketed`).
    """

    name: str
    configs: dict[type, ConfigSpace]
    exact: tuple[str, ...]
    bucketed: tuple[str, ...]
    default: Callable[..., Config | None]  # (sm_count=, **problem): the choice without a table
    # further configs that a search starts from: (sm_count=, **problem)
    starts: Callable[..., list[Config | None]] = lambda sm_count, **problem: []
    can_be_none: bool = False  # None is a choice, too: dequantize and cuBLAS

    def key(self, problem: Problem) -> Key:
        """Raises KeyError where the problem lacks a field."""
        return (
            self.name,
            *(problem[name] for name in self.exact),
            *(bucket(problem[name]) for name in self.bucketed),
        )

    def widest(self, problem: Problem) -> Problem:
        """The largest problem that shares its row."""
        return problem | {name: bucket(problem[name]) for name in self.bucketed}

    def fault(self, config: Config, problem: Problem) -> str | None:
        """Why the config cannot do all problems that share this one's row; None: it can."""
        return self.configs[type(config)].fault(config, **self.widest(problem))

    def runs_here(self, config: Config, problem: Problem, sm_count: int) -> bool:
        """Return True if all problems of the row can take the config on a GPU of so many SMs."""
        space = self.configs.get(type(config))
        if space is None or self.fault(config, problem) is not None:
            return False
        return space.fits(config, self.widest(problem), sm_count)

    def neighbours(self, config: Config) -> Iterator[Config]:
        """Every config that differs in one option, and in what must follow it."""
        space = self.configs[type(config)]
        for name, values in space.options.items():
            for value in values:
                yield from space.changed(config, name, value)
