"""The fuzzer itself: what it draws follows from the seed, and what it shows is small."""

import itertools
import json

import pytest

from tests.qkernels.fuzz.fuzzer import FuzzedOp, draw, failure, problems, replay_text, shrink


def run(*, M, kind, flag, seed):
    assert not (M >= 17 and kind == "odd"), "wrong"


OP = FuzzedOp(
    run=run,
    fields={"M": (1, 16, 17, 64, 1000), "kind": ("plain", "odd", "odder"), "flag": (False, True)},
    dynamic=("M",),
    cost=lambda *, M, **_: M,
    is_allowed=lambda *, M, kind, **_: kind != "odder" or M > 1,
)
OPS = {"one": OP, "two": OP}


def drawn(seed, count=40, repeats=2):
    return list(itertools.islice(problems(OPS, seed, 100, repeats), count))


def test_seed_reproduces_problems():
    assert drawn(3) == drawn(3) != drawn(4)


def test_problems_are_small_and_valid():
    for name, problem in drawn(0, 300):
        assert name in OPS and problem["M"] <= 64
        assert OP.is_allowed(**problem)
    assert {problem["M"] for _, problem in drawn(0, 300)} == {1, 16, 17, 64}


def test_repeats_change_only_dynamic_fields():
    (_, first), (_, second), (_, third) = drawn(1, 3)
    for other in (second, third):
        assert (other["kind"], other["flag"]) == (first["kind"], first["flag"])
    assert len({p["seed"] for p in (first, second, third)}) == 3


def test_operation_without_valid_problem_is_skipped():
    import random

    assert draw(OP, random.Random(0), max_cost=0) is None


def test_failing_problem_is_shrunk():
    problem = {"M": 1000, "kind": "odd", "flag": True, "seed": 5}
    small = shrink(OP, problem, seconds=5)
    assert small == {"M": 17, "kind": "odd", "flag": False, "seed": 5}
    assert "wrong" in str(failure(OP, small)) and failure(OP, small | {"M": 1}) is None
    assert shrink(OP, problem, seconds=0) == problem


def test_replay_text_round_trips():
    problem = {"M": 17, "kind": "odd", "flag": False, "seed": 5}
    assert json.loads(replay_text("one", problem)) == {"op": "one"} | problem


def test_any_exception_is_a_finding():
    def crash(**problem):
        raise ZeroDivisionError

    op = FuzzedOp(run=crash, fields={}, dynamic=(), cost=lambda **_: 0)
    assert isinstance(failure(op, {"seed": 0}), ZeroDivisionError)
    with pytest.raises(KeyboardInterrupt):
        failure(FuzzedOp(run=interrupt, fields={}, dynamic=(), cost=lambda **_: 0), {"seed": 0})


def interrupt(**problem):
    raise KeyboardInterrupt
