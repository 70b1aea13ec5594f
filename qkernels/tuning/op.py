"""Description of a tunable operation, for the tuning table and the search.

Each operation's folder defines its own TunedOp in `tuned.py`.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from qkernels.gpu.config import power_of_two

Config = object  # a frozen dataclass of launch parameters
Key = tuple[object, ...]
Problem = dict[str, object]


def bucket(count: int) -> int:
    """Return the largest count of the bucket that contains `count`.

    Buckets end at powers of two.
    """
    return power_of_two(count)


def one_field(config: Config, name: str, value: object) -> Iterator[Config]:
    """Yield the config with another value in one field, if the value differs."""
    if getattr(config, name) != value:
        yield dataclasses.replace(config, **{name: value})


def both_reductions(config: Config, name: str, value: object) -> Iterator[Config]:
    """Yield changed configs; a changed split is tried with and without `reduce_scatter`."""
    if name != "split":
        yield from one_field(config, name, value)
        return
    for scatter in (False, True):
        if (value, scatter) != (config.split, config.reduce_scatter):
            yield dataclasses.replace(config, split=value, reduce_scatter=scatter)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSpace:
    """The search space of one kernel variant's configs."""

    fault: Callable[
        ..., str | None
    ]  # (config, **problem fields) -> why the config cannot run; None: it can
    options: dict[str, tuple[object, ...]]  # values that a search tries, one field at a time
    # (config, option, value) -> configs with this option changed, and what depends on it
    changed: Callable[[Config, str, object], Iterator[Config]] = one_field
    # (config, widest problem, SMs) -> True if a GPU with so many SMs can run the config
    fits: Callable[[Config, Problem, int], bool] = lambda config, problem, sm_count: True


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedOp:
    """An operation with measured configs: how to find its table rows and how to search better ones.

    The key of a row has the `exact` fields of a problem, and the buckets of its `bucketed` fields.
    """

    name: str
    configs: dict[type, ConfigSpace]
    exact: tuple[str, ...]
    bucketed: tuple[str, ...]
    default: Callable[..., Config | None]  # (sm_count=, **problem) -> config without a table
    # (sm_count=, **problem) -> more configs that a search starts from
    starts: Callable[..., list[Config | None]] = lambda sm_count, **problem: []
    can_be_none: bool = False  # None is also a choice: dequantize, then cuBLAS

    def key(self, problem: Problem) -> Key:
        """Return the table key of a problem. Raises KeyError if the problem lacks a field."""
        return (
            self.name,
            *(problem[name] for name in self.exact),
            *(bucket(problem[name]) for name in self.bucketed),
        )

    def widest(self, problem: Problem) -> Problem:
        """Return the largest problem that has the same key."""
        return problem | {name: bucket(problem[name]) for name in self.bucketed}

    def fault(self, config: Config, problem: Problem) -> str | None:
        """Return why the config cannot run all problems with this problem's key; None: it can."""
        return self.configs[type(config)].fault(config, **self.widest(problem))

    def runs_here(self, config: Config, problem: Problem, sm_count: int) -> bool:
        """Return True if a GPU with `sm_count` SMs runs the config for every problem of the key."""
        space = self.configs.get(type(config))
        if space is None or self.fault(config, problem) is not None:
            return False
        return space.fits(config, self.widest(problem), sm_count)

    def neighbours(self, config: Config) -> Iterator[Config]:
        """Yield every config that differs in one option, and in fields that depend on it."""
        space = self.configs[type(config)]
        for name, values in space.options.items():
            for value in values:
                yield from space.changed(config, name, value)
