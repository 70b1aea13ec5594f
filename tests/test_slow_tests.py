"""The list of slow tests names tests that exist, and leaves a case of each."""

from tests.conftest import ROOT, SLOW_TESTS
from tests.measure_slow_tests import slow


def test_listed_tests_exist():
    """A test that was renamed runs again by default: take its old name off the list."""
    for name in SLOW_TESTS:
        path, _, function = name.partition("[")[0].partition("::")
        function = function.rpartition("::")[2]
        assert f"def {function}(" in (ROOT / path).read_text(), name


def test_cheapest_case_stays():
    seconds = {"a[1]": 0.4, "a[2]": 0.7, "a[3]": 0.1, "b": 1.1, "c": 1.3, "d[1]": 0.7, "d[2]": 3.0}
    assert sorted(slow(seconds)) == ["a[1]", "a[2]", "c", "d[2]"]
    assert slow({"e[1]": 0.9, "e[2]": 3.0}) == ["e[1]", "e[2]"]
