"""`qserve bench forward`: measure single steps of a model, which may have random weights.

The settings state the requests of each step exactly.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qserve.bench.machine import engine_settings, machine, write_json
from qserve.bench.pyplot import import_pyplot
from qserve.bench.statistics import median, spread_percent
from qserve.bench.steps.forward_settings import ForwardSettings, numbers
from qserve.bench.steps.step_case import StepCase
from qserve.bench.steps.step_floors import floors_us
from qserve.bench.steps.step_timer import StepTimer
from qserve.bench.steps.step_times import GRAPH_ROWS
from qserve.config import EngineConfig
from qserve.engine.engine import Engine
from qserve.hub.local import local_config
from qserve.profile.recorder import recorded
from qserve.profile.report import write_report

# In percent. A larger spread means that another program ran, or that the GPU's clock changed.
MAX_SPREAD = 0.5


def bench_forward(model: str, config: EngineConfig, settings: ForwardSettings) -> int:
    """Run `bench forward`."""
    config = local_config(config)
    if settings.plot is not None:
        import_pyplot("--plot")  # if it fails, it must fail before the measurement
    found: list[dict[str, Any]] = []
    result = {
        "model_id": model,
        "cases": found,
        "machine": machine(),
        "engine": engine_settings(config),
    }
    with contextlib.closing(Engine(config)) as engine:
        if engine.runner.graphs is not None:
            result[GRAPH_ROWS] = engine.runner.graphs.rows  # row counts to which a step is padded
        for each in _measured(engine, settings):
            found.append(each)
            write_json(settings.output_json, result)  # the file is complete if a later case fails
    if settings.plot is not None:
        from qserve.bench.steps.heat_map import draw_heat_maps

        draw_heat_maps(
            found,
            settings.plot,
            decode=(numbers(settings.decode_batches or "0"), numbers(settings.decode_contexts)),
            prefill=(numbers(settings.prefill_tokens or "0"), numbers(settings.prefill_contexts)),
        )
    return 0


def _measured(engine: Engine, settings: ForwardSettings) -> Iterator[dict[str, Any]]:
    """Measure each case, print its result, and yield it."""
    timer = StepTimer(engine)
    for case in settings.cases:
        timer.step_of(case)  # raises InputError before any measurement
    for case in settings.cases:
        found = measure(timer, case, settings)
        print(_line(found), flush=True)
        if found["spread_pct"] > MAX_SPREAD:
            print(f"  warning: the samples differ by more than {MAX_SPREAD} %", flush=True)
        if settings.profile_dir is not None:
            print(profile_case(engine, timer, case, settings), flush=True)
        yield found


def measure(timer: StepTimer, case: StepCase, settings: ForwardSettings) -> dict[str, Any]:
    """Measure one case. Return the median and the samples."""
    step = timer.step_of(case)
    run, graph = timer.replayed(step)
    timer.sample_us(run, max(3, settings.iters // 4))  # warm-up with the same shape
    samples = [timer.sample_us(run, settings.iters) for _ in range(settings.samples)]
    timer.launch_us(step, 2)
    launches = [timer.launch_us(step, settings.iters) for _ in range(settings.samples)]
    return {
        "case": case.name,
        "requests": [dataclasses.asdict(each) for each in case.requests],
        "num_requests": case.num_requests,
        "num_tokens": case.num_tokens,
        "median_us": median(samples),
        "spread_pct": spread_percent(samples),
        "samples_us": samples,
        "step_us": median(launches),  # with the transfer of inputs, and with sampling
        "graph": graph,
    }


def profile_case(
    engine: Engine, timer: StepTimer, case: StepCase, settings: ForwardSettings
) -> str:
    """Write a trace of some replays of a case, and return its table as text."""
    run, _ = timer.replayed(timer.step_of(case))
    timer.sample_us(run, 2)
    trace = Path(settings.profile_dir) / f"{case.name}.rank0.trace.json.gz"
    with recorded(engine.profiler.recorder, trace):
        for _ in range(settings.iters):
            with engine.step_ranges.named(case.name):
                run(1)
    return write_report(trace, floors_us(engine, case))


def _line(found: dict[str, Any]) -> str:
    return (
        f"[forward] {found['case']}: {found['num_requests']} reqs, {found['num_tokens']} tokens,"
        f" median {found['median_us']:.1f} us, sample spread {found['spread_pct']:.2f}%,"
        f" whole step {found['step_us']:.1f} us, graph {found['graph']}"
    )
