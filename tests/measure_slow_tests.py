"""Plugin that measures CPU time of each test, and writes the slow ones to tests/slow_tests.txt.

    python -m pytest tests -p tests.measure_slow_tests -p no:xdist

conftest.py marks what is listed there as exhaustive. CPU time, with that of child processes, is
about the same on a busy machine. Of each test with parameters at least one case stays in the
default run, unless all take more than KEPT_CASE seconds; a skipped case proves nothing and does
not count. Fixtures that tests share do not count:
without the test that happens to be the first, the next one would make them. A run of some folders
keeps the list's other tests. Tests that are gone from files of the run are taken off the list.
"""

import contextlib
import os
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("slow_tests.txt")
SLOW = 0.04  # seconds of CPU time; lowered whenever the default run takes 5 minutes on two cores
KEPT_CASE, KEPT_TEST = 0.7, 1.0  # of the cheapest case of a test, and of a test without parameters

_seconds: dict[str, float] = {}
_shared: dict[str, float] = {"seconds": 0.0}  # of fixtures that the current test shares
_skipped: set[str] = set()
_collected: set[str] = set()  # tests of whole files, with those that do not run


def _now() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(tryfirst=True)  # before any test is left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not any("::" in each for each in config.args):
        _collected.update(item.nodeid for item in items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    start, _shared["seconds"] = _now(), 0.0
    result = yield
    _seconds[item.nodeid] = _now() - start - _shared["seconds"]
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        _skipped.add(report.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef) -> Generator[None, object, object]:
    with left_out(fixturedef.scope != "function"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    with left_out(nextitem is None or nextitem.path != item.path):  # fixtures of a file end, too
        return (yield)


@contextlib.contextmanager
def left_out(is_shared: bool) -> Iterator[None]:
    """Do not count what runs inside for the current test if tests share it."""
    start, before = _now(), _shared["seconds"]
    yield
    if is_shared:
        _shared["seconds"] = before + _now() - start  # with those inside


def pytest_sessionfinish() -> None:
    known = LIST.read_text().splitlines() if LIST.exists() else []
    ran = {name: each for name, each in _seconds.items() if name not in _skipped}
    left = [each for each in still_there(known, _collected) if each not in ran]
    LIST.write_text("".join(f"{each}\n" for each in sorted({*left, *slow(ran)})))


def still_there(known: Iterable[str], collected: Iterable[str]) -> list[str]:
    """Tests of the list without those that their files no longer have."""
    found = {*collected}
    files = {each.partition("::")[0] for each in found}
    return [each for each in known if each in found or each.partition("::")[0] not in files]


def slow(seconds: Mapping[str, float]) -> list[str]:
    """Names of the tests that leave the default run."""
    cases: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for name, each in seconds.items():
        cases[name.partition("[")[0]].append((each, name))
    found = []
    for each in cases.values():
        cheapest, *others = sorted(each)
        if cheapest[0] >= (KEPT_CASE if others else KEPT_TEST):
            found.append(cheapest[1])
        found += [name for duration, name in others if duration >= SLOW]
    return found
