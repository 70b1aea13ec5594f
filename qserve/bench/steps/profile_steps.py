"""`qserve profile`: show the time of steps by operator class, measured or from a trace."""

import contextlib
from pathlib import Path

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.profile.chrome_trace import summarize
from qserve.profile.report import difference, to_text, write_report
from qserve.profile.settings import ProfileSettings


def profile(model: str | None, config: EngineConfig, settings: ProfileSettings) -> int:
    """Run `qserve profile`. It loads torch only if it measures steps."""
    if settings.trace is not None:
        summary = summarize(settings.trace)
        print(to_text(summary))
        if settings.with_trace is not None:
            print()
            print(difference(summary, summarize(settings.with_trace)))
        return 0
    if model is None:
        raise InputError("MODEL", "expected a model folder, found none", "name it, or set --trace")
    if not settings.case:
        raise InputError("--case", "expected at least one case", "such as decode=32*1@4096")
    _run(config, settings)
    return 0


def _run(config: EngineConfig, settings: ProfileSettings) -> None:
    from qserve.bench.steps.step_case import StepCase
    from qserve.bench.steps.step_floors import floors_us
    from qserve.bench.steps.step_timer import StepTimer
    from qserve.engine.engine import Engine
    from qserve.hub.local import local_config

    cases = [StepCase.parse(each) for each in settings.case]
    with contextlib.closing(Engine(local_config(config))) as engine:
        timer, recorder = StepTimer(engine), engine.profiler.recorder
        for case in cases:
            run, graph = timer.replayed(timer.step_of(case))
            quiet_us = timer.sample_us(run, settings.iters)
            trace = Path(settings.profile_dir) / f"{case.name}.rank0.trace.json.gz"
            recorder.start(trace, with_stack=settings.with_stack, kind=settings.profiler)
            try:
                for _ in range(settings.iters):
                    with engine.step_ranges.named(case.name):
                        run(1)
            finally:
                recorder.stop()
            print(f"\n{case.name}: {quiet_us:.1f} us without the profiler, graph {graph}")
            if settings.profiler == "torch":
                print(write_report(trace, floors_us(engine, case)), flush=True)
