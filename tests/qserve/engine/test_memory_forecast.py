"""MemoryForecast: requests that start are not preempted later, and pages are not left unused."""

import itertools
import random

import numpy as np
import pytest

from qserve.engine.kv_cache.block_pool import BlockPool
from qserve.engine.scheduling.admission import PATIENCE
from qserve.engine.scheduling.memory_forecast import (
    FIRST_GUESS,
    MARGIN_ENDS,
    MARGIN_STEP,
    NUM_LENGTHS,
    MemoryForecast,
    OutputLengths,
    _StepView,
)
from tests.qserve.engine.simulation import EOS, Simulation, make_request, make_scheduler

PAGE = 4


def known(name, prompt=4, max_tokens=4, **others):
    """A request that ends after `max_tokens` and not before."""
    request = make_request(name, prompt, max_tokens, **others)
    request.eos_token_ids = frozenset()
    return request


def run(scheduler, requests, lengths=None):
    """Runs all; returns (steps, preemptions, most pages in use, computed tokens).

    `lengths`: name -> tokens of the output, the last of which is EOS.
    """
    for request in requests:
        scheduler.add(request)
    pool, num_steps, num_preempted, most, computed = scheduler.pool, 0, 0, 0, 0
    while scheduler.num_requests:
        plan = scheduler.schedule()
        num_steps += 1
        num_preempted += len(plan.preempted)
        computed += plan.num_tokens
        most = max(most, pool.num_pages - pool.num_free)
        sampled = []
        for chunk in plan.chunks:
            if chunk.num_sampled:
                request = chunk.request
                is_last = request.num_output_tokens == (lengths or {}).get(request.request_id)
                sampled.append(EOS if is_last else 100)
        scheduler.update(plan, sampled)
        scheduler.check_integrity()
    return num_steps, num_preempted, most, computed


@pytest.mark.parametrize("seed", range(12))
def test_requests_of_known_lengths_are_never_preempted(seed):
    """The forecast also uses the pages, instead of only being careful."""

    def requests():
        rng = random.Random(seed)
        return [
            known(f"r{n}", rng.randrange(1, 30), rng.randrange(2, 120), group=str(n))
            for n in range(60)
        ]

    sizes = {"num_pages": 120, "page_size": PAGE, "max_num_seqs": 64, "budget": 96}
    steps, preempted, most, computed = run(make_scheduler(**sizes, forecasts=True), requests())
    plain_steps, plain_preempted, _, plain_computed = run(make_scheduler(**sizes), requests())
    assert preempted == 0 and plain_preempted > 5
    assert most >= 0.85 * sizes["num_pages"]
    assert computed < plain_computed and steps <= 1.3 * plain_steps


@pytest.mark.parametrize("eos", [frozenset(), frozenset({EOS})], ids=["known", "unknown"])
def test_enough_pages_for_all_limits_delay_no_request(eos):
    """With as many pages as all slots can fill, no request waits."""
    num, prompt, output = 16, 8, 25  # the last of 33 tokens is never in a page
    scheduler = make_scheduler(num * 32 // PAGE, PAGE, num, 40, forecasts=True)
    requests = [known(f"r{n}", prompt, output, group=str(n)) for n in range(num)]
    for request in requests:
        request.eos_token_ids = eos
    num_steps, preempted, most, _ = run(scheduler, requests)
    prompt_steps = num * prompt // 40 + 1
    assert (preempted, most) == (0, scheduler.pool.num_pages)
    assert num_steps <= prompt_steps + output


def test_burst_forecasts_each_running_request_once_per_step(monkeypatch):
    """Not at all running requests again for each that is admitted."""
    looked = []
    row = _StepView._row
    monkeypatch.setattr(_StepView, "_row", lambda *args: looked.append(1) or row(*args))
    num = 200
    for num_pages in (num * 40, num * 8):  # enough for all limits; enough for what is expected
        scheduler = make_scheduler(num_pages, PAGE, num, 10 * num, forecasts=True)
        for n in range(num):
            scheduler.add(known(f"r{n}", 8, 10 + n % 100, group=str(n)))
        looked.clear()
        plan = scheduler.schedule()
        assert len(plan.admitted) > num / 2
        assert len(looked) <= 2 * num


def test_incremental_forecast_equals_new_forecast():
    """Requests admitted in the step count as those that ran before it."""
    rng = random.Random(8)
    for _ in range(200):
        pool = BlockPool(rng.randrange(30, 120), PAGE)
        running, kept = [], MemoryForecast(pool)
        for n in range(rng.randrange(3, 20)):
            request = known(f"r{n}", rng.randrange(1, 30), rng.randrange(1, 60))
            needed = pool.pages_for(request.num_tokens)
            if needed > pool.num_free:
                break
            found = kept.allows(request, running, needed)
            assert found == MemoryForecast(pool).allows(request, running, needed)
            if found:
                pool.grow_(request.block_table, request.num_tokens)
                running.append(request)


def test_output_lengths_are_learned():
    rng = random.Random(5)
    lengths = {f"r{n}": rng.randrange(10, 60) for n in range(400)}

    def requests():
        return [make_request(name, 8, 1000, group=name) for name in lengths]

    sizes = {"num_pages": 300, "page_size": PAGE, "max_num_seqs": 64, "budget": 96}
    steps, preempted, most, _ = run(make_scheduler(**sizes, forecasts=True), requests(), lengths)
    plain_steps, plain_preempted, _, _ = run(make_scheduler(**sizes), requests(), lengths)
    assert preempted <= 8 < 40 < plain_preempted
    assert most >= 0.85 * sizes["num_pages"] and steps <= 1.4 * plain_steps


def test_forecast_with_shared_pages_prevents_preemption():
    rng = random.Random(3)
    shared = [rng.randrange(100, 999) for _ in range(24)]
    scheduler = make_scheduler(60, PAGE, 16, 40, forecasts=True)
    tokens = iter(lambda: rng.choice([EOS, 101, 102, 103, 104, 105]), None)
    simulation = Simulation(scheduler, 1, tokens)
    names = itertools.count()
    for _ in range(300):
        if rng.random() < 0.3:
            prompt = shared[: rng.randrange(4, 24)] + [rng.randrange(1000, 9999)]
            scheduler.add(make_request(f"r{next(names)}", prompt, rng.randrange(1, 40)))
        simulation.step()
    while scheduler.num_requests:
        simulation.step()
    assert len(simulation.done) == next(names)


def admitted_after(num_steps, request, **settings):
    """Return whether `request` runs after steps, next to one that will need all pages."""
    scheduler = make_scheduler(20, PAGE, 4, 40, forecasts=True, **settings)
    scheduler.add(known("large", 4, 70, client="one", group="a", priority=5))
    scheduler.update(scheduler.schedule(), [100])
    scheduler.add(request)
    for _ in range(num_steps):
        plan = scheduler.schedule()
        scheduler.update(plan, [100] * sum(chunk.num_sampled for chunk in plan.chunks))
    return request in scheduler.running


def test_request_waits_for_forecast_pages():
    waits = known("waits", 20, 30, client="one", group="b")
    assert not admitted_after(PATIENCE + 2, waits)
    fits = known("fits", 4, 2, client="one", group="b")
    assert admitted_after(1, fits), "it returns its pages before the other needs them"


def test_idle_client_does_not_wait_for_forecast():
    other = known("other", 20, 30, client="two", group="b")
    assert admitted_after(PATIENCE + 2, other)


def test_lower_priority_number_does_not_wait_for_forecast():
    from qserve.engine.scheduling.policies import make_policy

    urgent = known("urgent", 20, 30, client="one", group="b", priority=1)
    assert admitted_after(1, urgent, policy=make_policy("priority", prefill_batch_size=1))


def test_expected_lengths():
    lengths = OutputLengths(FIRST_GUESS)
    asked = np.array([0, 10, 400, 4000])
    assert lengths.expected(asked).tolist() == [FIRST_GUESS, FIRST_GUESS, 800, 8000]
    for _ in range(50):
        for length in (8, 20, 40):
            lengths.add(length)
    found = lengths.expected(np.array([0, 8, 20, 40]))
    assert found[:3] == pytest.approx([68 / 3, 30, 40]) and found[3] == FIRST_GUESS
    for _ in range(NUM_LENGTHS):
        lengths.add(7)
    assert lengths.expected(np.array([0]))[0] == 7, "the oldest are forgotten"


def test_guessed_lengths_count_until_enough_have_finished():
    """The outputs that end first are short."""
    lengths = OutputLengths(FIRST_GUESS)
    for _ in range(20):
        lengths.add(10)
    assert lengths.expected(np.zeros(20))[0] == 10
    mean = (20 * 10 + 80 * FIRST_GUESS) / 100
    assert lengths.expected(np.zeros(100))[0] == pytest.approx(mean)


def test_margin_grows_with_preemptions_and_shrinks_without():
    forecast = MemoryForecast(BlockPool(100, PAGE))
    running, request = [known("runs", 4, 60)], known("new", 4, 4)
    running[0].block_table = [0]
    running[0].num_computed = 4
    full = BlockPool(100, PAGE)
    full.grow_([], 84 * PAGE)
    forecast = MemoryForecast(full)  # 16 pages are free, and the two need 16 at most
    assert forecast.allows(request, running, 1)
    for _ in range(3):
        forecast.note_preemption()
    assert forecast._margin == pytest.approx(3 * MARGIN_STEP)
    assert not forecast.allows(request, running, 1)
    for _ in range(3 * MARGIN_ENDS):
        forecast.note_end(known("ended"))
    assert forecast.allows(request, running, 1)
