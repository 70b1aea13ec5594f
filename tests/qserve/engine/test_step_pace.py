"""Chunk sizes for a latency target: the model of step times, and a scheduler with a fake device."""

import random
from collections import deque

import pytest

from qserve.engine.scheduling.itl_control import MIN_PROMPT_TOKENS, ItlControl, StepLoad
from qserve.engine.scheduling.plan import load_of
from tests.qserve.engine.simulation import make_request, make_scheduler

TARGET = 0.012


def gpu_seconds(load: StepLoad) -> float:
    """A device like an H200 with an 8B model: 2 ms, 24 us a prompt token, and the keys."""
    return (
        0.002
        + 24e-6 * load.num_prompt_tokens
        + 15e-6 * load.num_decodes
        + 5e-9 * load.num_keys
        + 4e-10 * load.num_pairs
    )


class Clocked:
    """A scheduler driven as the engine does it with a step in flight, and measured by `gpu_seconds`
    with noise."""

    def __init__(self, scheduler, noise):
        self.scheduler = scheduler
        self.random, self.noise = random.Random(1), noise
        self.in_flight = deque()
        self.gaps = []  # seconds of steps that decode
        self.seconds = 0.0  # of all steps
        self.num_done = 0

    def step(self):
        plan = self.scheduler.schedule()
        if plan.chunks:
            self.in_flight.append(plan)
        while len(self.in_flight) > bool(plan.chunks):
            old = self.in_flight.popleft()
            sampled = [1] * sum(chunk.num_sampled for chunk in old.chunks)
            load = load_of(old.chunks)
            seconds = gpu_seconds(load) * (1 + self.random.uniform(-self.noise, self.noise))
            self.seconds += seconds
            if self.scheduler.pace is not None:
                self.scheduler.pace.observe(load, seconds)
            if load.num_decodes:
                self.gaps.append(seconds)
            events = self.scheduler.update(old, sampled)
            self.num_done += sum(event.finish_reason is not None for event in events)
        return plan


def make(target, noise=0.0):
    scheduler = make_scheduler(
        num_pages=40_000,
        page_size=16,
        max_num_seqs=128,
        budget=8192,
        pace=None if target is None else ItlControl(target),
    )
    return Clocked(scheduler, noise)


def serve(simulation, num_requests=120, prompt=1024):
    """A request in every 9th step."""
    for number in range(num_requests):
        simulation.scheduler.add(make_request(f"r{number}", prompt, 64, group=str(number)))
        for _ in range(9):
            simulation.step()
    while simulation.num_done < num_requests:
        simulation.step()


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_inter_token_latency_stays_below_target(noise):
    free, paced = make(None), make(TARGET, noise)
    for simulation in (free, paced):
        serve(simulation)
    assert max(free.gaps) > 2 * TARGET, "or there is nothing to limit"
    late = paced.gaps[len(paced.gaps) // 4 :]  # once it has measured
    assert sorted(late)[int(0.99 * len(late))] <= TARGET
    assert max(late) > 0.8 * TARGET, "what is left of the target is used"
    assert paced.seconds < 1.2 * free.seconds


def test_same_measurements_give_the_same_chunks():
    plans = []
    for _ in range(2):
        simulation = make(TARGET, noise=0.2)
        counts = []
        for number in range(20):
            simulation.scheduler.add(make_request(f"r{number}", 900, 20))
            for _ in range(4):
                counts.append([chunk.count for chunk in simulation.step().chunks])
        plans.append(counts)
    assert plans[0] == plans[1]


def test_chunk_of_a_prompt_that_runs_alone_is_not_limited():
    simulation = make(TARGET)
    simulation.scheduler.add(make_request("r0", 8000, 2))
    assert simulation.step().num_tokens == 8000


def test_every_latency_target_lets_prompts_finish():
    simulation = make(0.0001)
    simulation.scheduler.add(make_request("r0", 16, 200))
    simulation.step()
    simulation.scheduler.add(make_request("r1", 10 * MIN_PROMPT_TOKENS, 2))
    for _ in range(10):
        assert simulation.step().num_tokens == 1 + MIN_PROMPT_TOKENS


def fitted(noise=0.0, seed=3, num_steps=300):
    pace, rng = ItlControl(TARGET), random.Random(seed)
    for _ in range(num_steps):
        load = StepLoad(
            num_prompt_tokens=rng.choice([0, 0, 100, 300, 800]),
            num_decodes=(decodes := rng.randint(1, 60)),
            num_keys=decodes * rng.randint(100, 2000),
            num_pairs=rng.choice([0, 10**5, 10**6]),
        )
        pace.observe(load, gpu_seconds(load) * (1 + rng.uniform(-noise, noise)))
    return pace


def test_model_learns_the_cost_of_steps():
    load = StepLoad(num_prompt_tokens=400, num_decodes=30, num_keys=30_000, num_pairs=400_000)
    assert fitted().predict(load) == pytest.approx(gpu_seconds(load), rel=0.01)
    assert fitted(noise=0.2).predict(load) == pytest.approx(gpu_seconds(load), rel=0.1)


def test_prediction_error_margin_is_reserved():
    load = StepLoad(num_decodes=30, num_keys=30_000)
    exact, noisy = (fitted(noise).max_prompt_tokens(load, 0, 8192) for noise in (0.0, 0.3))
    assert noisy < exact
    whole = StepLoad(
        num_prompt_tokens=exact, num_decodes=30, num_keys=30_000, num_pairs=exact**2 // 2
    )
    assert gpu_seconds(whole) == pytest.approx(TARGET, rel=0.02)


def test_chunks_shrink_with_context_length():
    load = StepLoad(num_decodes=30, num_keys=30_000)
    pace = fitted()
    assert pace.max_prompt_tokens(load, 100_000, 8192) < pace.max_prompt_tokens(load, 0, 8192)


def test_single_delayed_step_has_little_weight():
    pace = fitted()
    load = StepLoad(num_prompt_tokens=300, num_decodes=30, num_keys=30_000)
    before = pace.predict(load)
    pace.observe(load, 5.0)
    assert pace.predict(load) < 2 * before
    for _ in range(50):
        pace.observe(load, gpu_seconds(load))
    assert pace.predict(load) == pytest.approx(gpu_seconds(load), rel=0.05)


def test_model_follows_a_device_that_becomes_slower():
    pace = fitted()
    load = StepLoad(num_prompt_tokens=300, num_decodes=30, num_keys=30_000)
    for _ in range(200):
        pace.observe(load, 3 * gpu_seconds(load))
    assert pace.predict(load) == pytest.approx(3 * gpu_seconds(load), rel=0.1)
