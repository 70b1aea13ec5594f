"""Command table of `qserve bench`: one row per benchmark.

Only a benchmark that computes something loads torch, when it runs.
"""

import dataclasses
import importlib
from collections.abc import Callable

from qserve.bench.kernel_settings import KernelBenchSettings
from qserve.bench.offline.offline_settings import (
    LatencySettings,
    StartupSettings,
    ThroughputSettings,
)
from qserve.bench.quantize_settings import QuantizeBenchSettings
from qserve.bench.requests.dataset_settings import DatasetSettings
from qserve.bench.serving.serve_settings import ServeBenchSettings
from qserve.bench.serving.sweep_settings import PlotSettings, SweepSettings
from qserve.bench.simulation.simulate_settings import SimulateSettings
from qserve.bench.steps.forward_settings import CompareSettings, ForwardSettings
from qserve.command_line.command import Command
from qserve.config import EngineConfig
from qserve.profile.settings import ProfileSettings


def _late(module: str, name: str) -> Callable[..., int]:
    """Return a function whose module is imported only when it is called."""

    def run(*settings: object) -> int:
        return getattr(importlib.import_module(f"qserve.bench.{module}"), name)(*settings)

    return run


def _quantize(settings: QuantizeBenchSettings) -> int:
    run = importlib.import_module("calibrate.bench").bench_quantize
    return run(**dataclasses.asdict(settings))


MODEL = {"argument_is_flag_too": True}

RESULTS = {"argument": "results", "argument_help": "folder of a sweep, or of results"}
SWEEP_COMMANDS: dict[str, Command] = {
    "serve": Command(
        help="run `bench serve` with every combination of settings",
        settings=(SweepSettings,),
        run=_late("serving.sweep", "bench_sweep_serve"),
        argument=None,
    ),
    "plot": Command(
        help="plot latency over load",
        settings=(PlotSettings,),
        run=_late("serving.sweep_plot", "bench_plot"),
        **RESULTS,
    ),
    "plot_pareto": Command(
        help="plot throughput per GPU over speed per user, with the Pareto frontier",
        settings=(PlotSettings,),
        run=_late("serving.sweep_plot", "bench_plot_pareto"),
        **RESULTS,
    ),
}

BENCH_COMMANDS: dict[str, Command] = {
    "latency": Command(
        help="measure the latency of one static batch in this process",
        settings=(EngineConfig, LatencySettings),
        run=_late("offline.latency", "bench_latency"),
        **MODEL,
    ),
    "throughput": Command(
        help="measure the throughput of many requests in this process, all sent together",
        settings=(EngineConfig, DatasetSettings, ThroughputSettings),
        run=_late("offline.throughput", "bench_throughput"),
        **MODEL,
    ),
    "serve": Command(
        help="send requests to an OpenAI-compatible server and measure what clients see",
        settings=(ServeBenchSettings, DatasetSettings),
        run=_late("serving.serve", "bench_serve"),
        argument_help="model name; default: the first that the server lists",
        argument_optional=True,
        **MODEL,
    ),
    "forward": Command(
        help="measure single steps with specified requests, in microseconds",
        settings=(EngineConfig, ForwardSettings),
        run=_late("steps.forward", "bench_forward"),
        **MODEL,
    ),
    "compare": Command(
        help="compare two benchmark results",
        settings=(CompareSettings,),
        run=_late("compare", "bench_compare"),
        argument="a",
        argument_help="JSON file of a result",
    ),
    "simulate": Command(
        help="run requests through the scheduler on a virtual clock, without a GPU",
        settings=(SimulateSettings, DatasetSettings),
        run=_late("simulation.simulate", "bench_simulate"),
        argument=None,
    ),
    "startup": Command(
        help="measure cold and warm starts of the engine, up to the first token",
        settings=(EngineConfig, StartupSettings),
        run=_late("offline.startup", "bench_startup"),
        **MODEL,
    ),
    "sweep": Command(
        help="measure a server with many combinations of settings, and plot the results",
        commands=SWEEP_COMMANDS,
    ),
    "quantize": Command(
        help="measure the quantization of a few layers of a model's shape with random weights,"
        " and estimate the time for all layers",
        settings=(QuantizeBenchSettings,),
        run=_quantize,
        argument=None,
    ),
    "kernels": Command(
        help="measure kernels against their roofline and against other kernels",
        settings=(KernelBenchSettings,),
        run=_late("kernels", "bench_kernels"),
        argument=None,
    ),
}

PROFILE = Command(
    help="measure the time of steps by operator class, or read it from a trace",
    settings=(EngineConfig, ProfileSettings),
    run=_late("steps.profile_steps", "profile"),
    argument_optional=True,
    **MODEL,
)
