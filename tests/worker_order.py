"""Plugin of the workers of a run of all tests: each collects the modules in another order.

pytest rewrites the assertions of a module that has no bytecode yet. Workers that collect in one
order all rewrite the same module at the same time, and each needs 10 s for all tests of a fresh
clone. In different orders they find most modules rewritten by another worker.
"""

import random

import pytest


class WorkerOrder:
    """Shuffles the entries of each folder while tests are collected, then restores their order."""

    def __init__(self, worker: str) -> None:
        self._random = random.Random(worker)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> object:
        report = yield
        if isinstance(collector, pytest.Directory):
            self._random.shuffle(report.result)
        return report

    @pytest.hookimpl(tryfirst=True)  # pytest groups the tests of a fixture from this order
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: item.path.parts)  # stable: the order within a module stays
