"""A limit for engines that would step for ever."""

import pytest

from qserve.engine.engine import Engine

MOST_STEPS_WITHOUT_EVENTS = 1000


@pytest.fixture(autouse=True)
def step_limit(monkeypatch):
    """An engine that emits nothing for so many steps stands still: the test fails, not hangs."""
    step, in_vain = Engine.step, 0

    def counted(engine):
        nonlocal in_vain
        events = step(engine)
        in_vain = 0 if events else in_vain + 1
        assert in_vain <= MOST_STEPS_WITHOUT_EVENTS, "the engine emits nothing any more"
        return events

    monkeypatch.setattr(Engine, "step", counted)
