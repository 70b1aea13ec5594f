"""The list of slow tests names tests that exist, and leaves a case of each; workers share work."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from tests import measure_slow_tests
from tests.conftest import (
    LEFT_OUT,
    ROOT,
    SLOW_TESTS,
    pytest_collection_modifyitems,
    pytest_terminal_summary,
)
from tests.measure_slow_tests import left_out, slow, still_there
from tests.worker_order import WorkerOrder

EXHAUSTIVE = {"exhaustive": pytest.mark.exhaustive.mark}


def test_listed_tests_exist():
    """A test that was renamed runs again by default: take its old name off the list."""
    for name in SLOW_TESTS:
        path, _, function = name.partition("[")[0].partition("::")
        function = function.rpartition("::")[2]
        assert f"def {function}(" in (ROOT / path).read_text(), name


def test_cheapest_case_is_not_listed():
    seconds = {"a[1]": 0.4, "a[2]": 0.7, "a[3]": 0.1, "b": 0.9, "c": 1.1, "d[1]": 0.6, "d[2]": 3.0}
    assert sorted(slow(seconds)) == ["a[1]", "a[2]", "c", "d[2]"]
    assert slow({"e[1]": 0.9, "e[2]": 3.0}) == ["e[1]", "e[2]"]


def test_skipped_case_is_not_the_one_that_stays(monkeypatch, tmp_path):
    """A default run with skipped cases alone would prove nothing."""
    seconds = {"a[1]": 0.5, "a[2]": 0.4, "a[3]": 0.0, "a[4]": 0.0}
    monkeypatch.setattr(measure_slow_tests, "LIST", tmp_path / "list")
    monkeypatch.setattr(measure_slow_tests, "_seconds", seconds)
    monkeypatch.setattr(measure_slow_tests, "_skipped", set())
    monkeypatch.setattr(measure_slow_tests, "_collected", set(seconds))
    measure_slow_tests.LIST.write_text("a[2]\na[3]\n")
    for name in seconds:
        report = SimpleNamespace(nodeid=name, skipped=name in ("a[3]", "a[4]"))
        measure_slow_tests.pytest_runtest_logreport(report)
    measure_slow_tests.pytest_sessionfinish()
    assert measure_slow_tests.LIST.read_text() == "a[1]\na[3]\n"


def test_shared_fixture_time_is_excluded(monkeypatch):
    now = iter([10.0, 11.0, 13.0, 20.0, 30.0, 31.0, 33.0, 40.0])
    monkeypatch.setattr(measure_slow_tests, "_now", lambda: next(now))
    monkeypatch.setitem(measure_slow_tests._shared, "seconds", 0.0)
    with left_out(True), left_out(True):
        pass
    assert measure_slow_tests._shared["seconds"] == 10, "the inner one is part of the outer one"
    with left_out(False), left_out(True):
        pass
    assert measure_slow_tests._shared["seconds"] == 12


def test_removed_tests_are_dropped_from_list():
    known = ["a.py::one[1]", "a.py::one[2]", "a.py::two", "b.py::three"]
    assert still_there(known, ["a.py::one[2]", "a.py::four"]) == ["a.py::one[2]", "b.py::three"]


@pytest.mark.parametrize("marks", ["exhaustive", "gpu and exhaustive", "not exhaustive", ""])
def test_exhaustive_marker_without_flag_is_reported(marks):
    lines, stash = [], pytest.Stash()
    stash[LEFT_OUT] = 3
    config = SimpleNamespace(stash=stash, getoption={"markexpr": marks}.__getitem__)
    reporter = SimpleNamespace(write_line=lambda text, **_: lines.append(text))
    pytest_terminal_summary(reporter, config)
    said = f"-m {marks!r}: 3 exhaustive tests did not run; add --exhaustive"
    assert lines == ([said] if marks in ("exhaustive", "gpu and exhaustive") else [])


@pytest.mark.parametrize("is_asked_for", [False, True])
def test_number_of_deselected_tests_is_stored(monkeypatch, is_asked_for):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = {"--exhaustive": is_asked_for, "--exhaustive-part": None}
    config = SimpleNamespace(
        stash=pytest.Stash(),
        getoption=options.__getitem__,
        hook=SimpleNamespace(pytest_deselected=lambda items: None),
    )
    item = Mock(nodeid="a.py::b", get_closest_marker=EXHAUSTIVE.get)
    items = [item]
    pytest_collection_modifyitems(config, items)
    assert items == ([item] if is_asked_for else [])
    assert config.stash.get(LEFT_OUT, 0) == (0 if is_asked_for else 1)


@pytest.mark.parametrize("marker", ["gpu", "hopper"])
def test_gpu_tests_of_any_folder_are_skipped_without_gpu(monkeypatch, marker):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = {"--exhaustive": True, "--exhaustive-part": None}
    config = SimpleNamespace(getoption=options.__getitem__)
    item = Mock(nodeid="a.py::b", get_closest_marker={marker: pytest.mark.gpu.mark}.get)
    pytest_collection_modifyitems(config, [item])
    (mark,), _ = item.add_marker.call_args
    assert mark == pytest.mark.skip(reason="needs a CUDA GPU")


def collected(order, collector, children):
    report = SimpleNamespace(result=list(children))
    hook = order.pytest_make_collect_report(Mock(spec=collector))
    next(hook)
    with pytest.raises(StopIteration):
        hook.send(report)
    return report.result


def test_workers_collect_in_different_orders_and_run_in_one():
    modules = [Path(f"tests/{folder}/test_{i}.py") for folder in "ab" for i in range(9)]
    found = {}
    for worker in ("gw0", "gw1", "gw2"):
        order = WorkerOrder(worker)
        assert collected(order, pytest.Module, modules) == modules, "tests of a module stay"
        found[worker] = tuple(collected(order, pytest.Directory, modules))
        items = [Mock(path=path, number=i) for path in found[worker] for i in (2, 1)]
        order.pytest_collection_modifyitems(items)
        assert [(each.path, each.number) for each in items] == [
            (path, i) for path in modules for i in (2, 1)
        ]
    assert len({*found.values(), tuple(modules)}) == 4
    assert all(sorted(each) == modules for each in found.values())
