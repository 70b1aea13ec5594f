"""`qserve bench simulate`: the schedule of the engine, exact times, the same result twice."""

import json
import math
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.errors import InputError
from qserve.bench.requests.dataset_settings import DatasetSettings
from qserve.bench.simulation.replica import Replica
from qserve.bench.simulation.simulate import (
    bench_simulate,
    drive,
    find_max_rate,
    make_requests,
    make_scheduler,
    simulate,
)
from qserve.bench.simulation.simulate_settings import SimulateSettings
from qserve.bench.steps.step_times import StepTimes
from qserve.config import EngineConfig
from qserve.engine.engine import Engine
from qserve.engine.scheduling.itl_control import StepLoad
from qserve.params.sampling_params import SamplingParams

STEP = 0.01
FIXED = StepTimes.fixed(STEP)


def asked(**others):
    return SimulateSettings(**({"step_ms": 1e3 * STEP} | others))


def data(**others):
    defaults = {"num_prompts": 40, "random_input_len": 30, "random_output_len": 9}
    return DatasetSettings(**(defaults | {"random_range_ratio": 0.5} | others))


def plans_of(run):
    """The chunks of each step, which `run` hands to its argument."""
    plans = []

    def note(plan):
        chunks = [(chunk.request.request_id, chunk.start, chunk.count) for chunk in plan.chunks]
        if chunks:
            plans.append(chunks)

    run(note)
    return plans


@pytest.mark.exhaustive
@pytest.mark.parametrize("depth", [0, 1])
def test_simulated_schedule_equals_engine(depth):
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 48}
    wanted = asked(num_pages=24, request_rate=25, sync_scheduling=not depth, **limits)
    requests = make_requests(wanted, data())

    def simulated(note):
        simulate(wanted, data(), FIXED, watch=lambda start, plan, end: note(plan))

    def real(note):
        config = EngineConfig(
            model="examples/models/docs-5m",
            device="cpu",
            num_gpu_blocks_override=24,
            admission="fits",
            enable_prefix_caching=False,
            **limits,
        )
        engine = Engine(config, steps_in_flight=depth)
        schedule, made = engine.scheduler.schedule, []
        engine.scheduler.schedule = lambda: made.append(schedule()) or made[-1]
        waiting, ends = deque(requests), deque()
        clock = free_at = 0.0
        while waiting or engine.has_work():
            if not engine.has_work():
                clock = max(clock, waiting[0].arrival)
            while waiting and waiting[0].arrival <= clock:
                each = waiting.popleft()
                params = SamplingParams(max_tokens=each.output_len, ignore_eos=True)
                engine.add_request(each.name, [5] * each.input_len, params, group=each.name)
            engine.step()
            note(made[-1])
            if made[-1].chunks:
                free_at = max(clock, free_at) + STEP
                ends.append(free_at)
            while len(ends) > (depth if made[-1].chunks else 0):
                clock = max(clock, ends.popleft())

    expected = plans_of(real)
    assert plans_of(simulated) == expected
    assert max(len(chunks) for chunks in expected) > 2, "requests must overlap"


def test_single_request_takes_expected_steps():
    found = simulate(asked(), data(num_prompts=1, random_range_ratio=0), FIXED)
    assert found["median_ttft_ms"] == pytest.approx(10)
    assert found["median_tpot_ms"] == pytest.approx(10)
    assert found["median_e2el_ms"] == pytest.approx(90)
    assert found["num_steps"] == 9 and found["total_output_tokens"] == 9


def test_overhead_counts_only_before_first_token():
    one = data(num_prompts=1, random_range_ratio=0)
    found = simulate(asked(request_overhead_ms=7), one, FIXED)
    assert found["median_ttft_ms"] == pytest.approx(17)
    assert found["median_tpot_ms"] == pytest.approx(10)


@settings(max_examples=25, deadline=None)
@given(
    rate=st.sampled_from([5.0, 50.0, math.inf]),
    pages=st.integers(8, 60),
    replicas=st.integers(1, 3),
    router=st.sampled_from(["round-robin", "random", "least-outstanding", "prefix"]),
    policy=st.sampled_from(["fcfs", "prefill-first", "longest-prefix", "controlled"]),
    concurrency=st.sampled_from([None, 1, 5]),
    seed=st.integers(0, 5),
)
def test_every_request_gets_its_tokens_in_order(
    rate, pages, replicas, router, policy, concurrency, seed
):
    wanted = asked(
        num_pages=pages,
        request_rate=rate,
        replicas=replicas,
        router=router,
        scheduling_policy=policy,
        max_concurrency=concurrency,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        seed=seed,
    )
    requests = make_requests(wanted, data(num_prompts=12))
    group = [Replica(make_scheduler(wanted), FIXED) for _ in range(replicas)]
    drive(group, requests, wanted)
    for each in requests:
        assert len(each.token_times) == each.output_len
        assert each.first_token >= each.arrival + STEP - 1e-9
        gaps = [b - a for a, b in zip(each.token_times, each.token_times[1:], strict=False)]
        assert all(gap >= STEP - 1e-9 for gap in gaps)
    assert all(each.scheduler.pool.num_free == pages for each in group)
    if concurrency == 1:
        ends = sorted((each.arrival, each.last_token) for each in requests)
        assert all(a[1] <= b[0] + 1e-9 for a, b in zip(ends, ends[1:], strict=False))


def test_simulation_is_deterministic():
    wanted = asked(request_rate=40, router="random", replicas=2)
    assert simulate(wanted, data(), FIXED) == simulate(wanted, data(), FIXED)
    other = simulate(asked(request_rate=40, router="random", replicas=2, seed=1), data(), FIXED)
    assert other != simulate(wanted, data(), FIXED)


def test_shared_prefixes_hit_the_cache(tmp_path):
    rows = [
        {
            "timestamp": 3000 * i,
            "input_length": 1500,
            "output_length": 2,
            "hash_ids": [1, 2, 10 + i],
        }
        for i in range(4)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    times = StepTimes(
        token_counts=(1, 1001), product_seconds=(0.0, 1.0), key_seconds=0, pair_seconds=0
    )
    wanted = {"trace": str(path), "max_num_batched_tokens": 2048}
    plain = simulate(asked(**wanted), data(num_prompts=4), times)
    shared = simulate(asked(**wanted, prefix_caching=True), data(num_prompts=4), times)
    assert plain["median_ttft_ms"] == pytest.approx(1499, rel=0.01)
    assert shared["median_ttft_ms"] == pytest.approx(1500 - 1024, rel=0.01)


def test_trace_without_prefixes_is_refused_with_prefix_caching(tmp_path):
    trace = tmp_path / "azure.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,40,4\n")
    assert simulate(asked(trace=str(trace)), data(), FIXED)["num_prompts"] == 1
    with pytest.raises(InputError, match="does not state which prompts share a prefix"):
        simulate(asked(trace=str(trace), prefix_caching=True), data(), FIXED)


def test_highest_rate_meets_latency_limits():
    wanted = asked(goodput=["ttft:60", "tpot:20"], find_max_rate=True, max_num_seqs=2)
    rate = find_max_rate(wanted, data(num_prompts=60), FIXED)
    assert 1 < rate < 30  # two places, 90 ms each: about 22 a second at most


def case(name, us, *requests):
    names = ("count", "query_len", "kv_len")
    return {
        "case": name,
        "median_us": us,
        "requests": [dict(zip(names, each, strict=True)) for each in requests],
    }


def test_too_few_requests_for_rate_search_are_refused():
    """All of them run in one batch, so every rate meets the limits."""
    wanted = asked(goodput=["ttft:500", "tpot:30"], find_max_rate=True)
    with pytest.raises(InputError, match="--num-prompts: 40 requests meet .* every rate"):
        find_max_rate(wanted, data(), FIXED)


def test_error_of_step_times_is_printed_only_if_they_were_fitted(capsys):
    assert bench_simulate(asked(), data()) == 0
    out = capsys.readouterr().out
    assert "KV pages in use" in out and "fitted" not in out


def test_step_times_equal_measured():
    def true_us(tokens, keys, pairs):
        return 2000 + max(0, tokens - 64) * 20 + keys / 1e5 * 500 + pairs / 1e7 * 900

    cases = [
        case(f"d{n}x{k}", true_us(n, n * (k + 1), 0), (n, 1, k)) for n in (1, 64) for k in (0, 999)
    ]
    cases += [
        case(f"p{n}x{k}", true_us(n, 0, n * (2 * k + n) // 2), (1, n, k))
        for n in (64, 512, 2048)
        for k in (0, 4096)
    ]
    times = StepTimes.fit(cases)
    assert times.error < 1e-6
    mixed = StepLoad(num_prompt_tokens=500, num_decodes=12, num_keys=24_000, num_pairs=10**6)
    assert times.of_load(mixed) == pytest.approx(true_us(512, 24_000, 10**6) / 1e6)
    beyond = StepLoad(num_prompt_tokens=4096)
    assert times.of_load(beyond) == pytest.approx(true_us(4096, 0, 0) / 1e6)


def test_step_times_equal_padded_graph_times(tmp_path):
    """Nine decodes take the time of sixteen; with a prompt, that of the next chunk graph."""
    rows = {"decode": [1, 8, 16], "chunk": [64, 128]}
    seen = {1: 1000, 8: 1500, 16: 2500, 64: 4000, 128: 7000, 300: 16_000}
    cases = [case(f"d{n}", 1, (n, 1, 0)) | {"step_us": seen[n]} for n in (1, 8, 16)]
    cases += [case(f"p{n}", 1, (1, n, 0)) | {"step_us": seen[n]} for n in (64, 128, 300)]
    path = tmp_path / "steps.json"
    path.write_text(json.dumps({"cases": cases, "graph_rows": rows}))
    times = StepTimes.read(str(path))
    for prompt, decodes, tokens in (
        (0, 1, 1),
        (0, 3, 8),
        (0, 9, 16),
        (2, 3, 64),
        (60, 5, 128),
        (300, 0, 300),
    ):
        load = StepLoad(num_prompt_tokens=prompt, num_decodes=decodes)
        assert times.of_load(load) == pytest.approx(seen[tokens] / 1e6, rel=1e-3), load
    between = StepLoad(num_prompt_tokens=214)  # in no graph
    assert times.of_load(between) == pytest.approx(11_500e-6, rel=1e-3)


def test_other_result_file_is_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text('{"duration": 1}')
    with pytest.raises(InputError, match="bench forward"):
        StepTimes.read(str(path))
    with pytest.raises(InputError, match="--steps"):
        SimulateSettings()


def test_unknown_metrics_are_refused():
    with pytest.raises(InputError, match="--percentile-metrics: expected some of"):
        SimulateSettings(step_ms=1.0, percentile_metrics="ttft,ttfb")
