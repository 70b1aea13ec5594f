"""Draw problems from a seed, and shrink a failing one.

A problem is a dict of JSON values, one for each field of its operation; a field lists its values
from simple to hard, so that shrinking is replacing a value by an earlier one.
"""

import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Problem = dict[str, object]
MAX_DRAWS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzedOp:
    """`run` raises where the kernel is wrong. `dynamic` fields need no new compilation."""

    run: Callable[..., None]
    fields: dict[str, tuple[object, ...]]
    dynamic: tuple[str, ...]
    cost: Callable[..., int]  # what the interpreter must do for it, in products or elements
    is_allowed: Callable[..., bool] = lambda **problem: True


def draw(
    op: FuzzedOp, rng: random.Random, max_cost: int, start: Problem | None = None
) -> Problem | None:
    """A problem of the operation: all fields, or the dynamic ones of `start`. None: none fits."""
    for _ in range(MAX_DRAWS):
        names = op.fields if start is None else op.dynamic
        problem = (start or {}) | {name: rng.choice(op.fields[name]) for name in names}
        problem["seed"] = rng.randrange(10**6)
        if op.is_allowed(**problem) and op.cost(**problem) <= max_cost:
            return problem
    return None


def problems(
    ops: dict[str, FuzzedOp], seed: int, max_cost: int, repeats: int
) -> Iterator[tuple[str, Problem]]:
    """Yield problems of the operations in turn, forever.

    Each problem is followed by `repeats` more with other dynamic fields.
    """
    rng = random.Random(seed)
    while True:
        for name in rng.sample(sorted(ops), len(ops)):
            first = problem = draw(ops[name], rng, max_cost)
            for _ in range(1 + repeats):
                if problem is not None:
                    yield name, problem
                problem = first and draw(ops[name], rng, max_cost, first)


def shrink(op: FuzzedOp, problem: Problem, seconds: float) -> Problem:
    """The simplest problem that still fails and that was found in time."""
    end = time.monotonic() + seconds
    simpler = True
    while simpler:
        simpler = False
        for name, values in op.fields.items():
            for value in values[: values.index(problem[name])]:
                smaller = problem | {name: value}
                if time.monotonic() > end:
                    return problem
                if op.is_allowed(**smaller) and failure(op, smaller) is not None:
                    problem, simpler = smaller, True
                    break
    return problem


def failure(op: FuzzedOp, problem: Problem) -> Exception | None:
    """Return the error that `run` raises, or None."""
    try:
        op.run(**problem)
    except Exception as error:  # any error is a finding; it is shown, with its problem
        return error
    return None


def replay_text(name: str, problem: Problem) -> str:
    """Return the argument of --fuzz-replay for a problem."""
    return json.dumps({"op": name} | problem)
