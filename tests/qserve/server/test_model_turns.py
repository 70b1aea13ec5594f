"""Models that share memory by sleep: one is awake, none starves, nothing is lost."""

import asyncio
import random

import pytest

from formats.errors import InputError
from qserve.engine.control.commands import Sleep, WakeUp
from qserve.server.http.errors import ApiError
from qserve.server.models.turns import ModelTurns, fall_asleep


class Device:
    """Engines that check that at most one of them is awake."""

    def __init__(self, count, awake=0):
        self.awake, self.log, self.problems = {awake}, [], {}
        self.clients = [Engine(self, index) for index in range(count)]


class Engine:
    def __init__(self, device, index):
        self.device, self.index, self.num_running = device, index, 0

    async def operate(self, command):
        await asyncio.sleep(0)
        self.device.log.append((type(command).__name__, self.index))
        problem = self.device.problems.pop((type(command), self.index), "")
        if problem == "dies":
            raise RuntimeError(problem)
        if problem:
            return None, problem
        if isinstance(command, Sleep):
            assert command.mode == "wait" and not self.num_running
            self.device.awake.remove(self.index)
        else:
            assert not self.device.awake, "two models awake"
            self.device.awake.add(self.index)
        return None, ""

    async def serve(self, turns, steps=1):
        await turns.enter(self.index)
        try:
            assert self.device.awake == {self.index}
            self.num_running += 1
            try:
                for _ in range(steps):
                    await asyncio.sleep(0)
            finally:
                self.num_running -= 1
        finally:
            turns.leave()


def test_requests_of_the_awake_model_start_at_once():
    async def scenario():
        device = Device(2)
        turns = ModelTurns(device.clients, 5.0)
        await asyncio.gather(*(device.clients[0].serve(turns) for _ in range(4)))
        assert device.log == []

    asyncio.run(scenario())


@pytest.mark.parametrize(("seconds", "order"), [(0.0, "waits"), (5.0, "starts")])
def test_awake_model_accepts_requests_for_limited_time(seconds, order):
    async def scenario():
        device, now = Device(2), [0.0]
        turns = ModelTurns(device.clients, seconds, clock=lambda: now[0])
        await turns.enter(0)
        other = asyncio.ensure_future(turns.enter(1))
        await asyncio.sleep(0)
        now[0] = 4.0
        late = asyncio.ensure_future(turns.enter(0))
        await asyncio.sleep(0)
        assert late.done() == (order == "starts") and not other.done()
        now[0] = 6.0
        later = asyncio.ensure_future(turns.enter(0))
        await asyncio.sleep(0)
        assert not later.done(), "the other model would wait for ever"
        turns.leave()
        if order == "starts":
            turns.leave()
        await other
        assert device.awake == {1} and not later.done()
        turns.leave()
        await later
        assert device.awake == {0}

    asyncio.run(scenario())


@pytest.mark.parametrize("problem", ["no memory", "dies"])
def test_failed_wake_fails_only_its_requests(problem):
    async def scenario():
        device = Device(3)
        turns = ModelTurns(device.clients, 0.0)
        device.problems[WakeUp, 1] = problem
        found = await asyncio.gather(
            *(device.clients[index].serve(turns) for index in (0, 1, 1, 2)), return_exceptions=True
        )
        assert [type(each) for each in found] == [type(None), ApiError, ApiError, type(None)]
        assert found[1].status == 503 and problem in found[1].message
        await device.clients[1].serve(turns)
        assert device.awake == {1}

    asyncio.run(scenario())


def test_failed_sleep_keeps_model_serving():
    async def scenario():
        device = Device(2)
        turns = ModelTurns(device.clients, 0.0)
        device.problems[Sleep, 0] = "no host memory"
        with pytest.raises(ApiError, match="no host memory"):
            await device.clients[1].serve(turns)
        await device.clients[0].serve(turns)
        assert device.awake == {0}
        device.problems[Sleep, 0] = "no host memory"
        with pytest.raises(InputError, match="model a: cannot sleep: no host memory"):
            await fall_asleep(device.clients[0], "model a")

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(20))
def test_random_requests_and_cancellations(seed):
    """Each request runs while its model is awake, or is cancelled; in the end nothing is held."""

    async def scenario():
        rng, device = random.Random(seed), Device(3)
        turns = ModelTurns(device.clients, rng.choice([0.0, 100.0]))
        tasks = []
        for _ in range(200):
            client = rng.choice(device.clients)
            tasks.append(asyncio.ensure_future(client.serve(turns, rng.randrange(4))))
            if rng.random() < 0.3:
                rng.choice(tasks).cancel()
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
        async with asyncio.timeout(60):
            found = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(each) for each in found} <= {type(None), asyncio.CancelledError}
        assert found.count(None) > 50
        assert turns._num_running == 0 and not turns._waiting

    asyncio.run(scenario())
