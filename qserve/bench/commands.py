"""The table of `qserve bench`: a row a benchmark. Loads torch only to work."""

import importlib
from collections.abc import Callable

from qserve.bench.dataset_settings import DatasetSettings
from qserve.bench.forward_settings import CompareSettings, ForwardSettings
from qserve.bench.kernel_settings import KernelBenchSettings
from qserve.bench.offline_settings import LatencySettings, StartupSettings, ThroughputSettings
from qserve.bench.serve_settings import ServeBenchSettings
from qserve.bench.simulate_settings import SimulateSettings
from qserve.command import Command
from qserve.config import EngineConfig
from qserve.profile.settings import ProfileSettings


def _late(module: str, name: str, package: str = "qserve.bench") -> Callable[..., int]:
    """A function of a module that is imported when it is called."""

    def run(*settings: object) -> int:
        return getattr(importlib.import_module(f"{package}.{module}"), name)(*settings)

    return run


MODEL = {"argument_is_flag_too": True}

BENCH_COMMANDS: dict[str, Command] = {
    "latency": Command(
        help="time one static batch in this process",
        settings=(EngineConfig, LatencySettings),
        run=_late("latency", "bench_latency"),
        **MODEL,
    ),
    "throughput": Command(
        help="time many requests in this process, all at once",
        settings=(EngineConfig, DatasetSettings, ThroughputSettings),
        run=_late("throughput", "bench_throughput"),
        **MODEL,
    ),
    "serve": Command(
        help="put load on an OpenAI server and measure what its clients see",
        settings=(ServeBenchSettings, DatasetSettings),
        run=_late("serve", "bench_serve"),
        argument_help="model name; default: the first that the server lists",
        argument_optional=True,
        **MODEL,
    ),
    "forward": Command(
        help="time exact steps of a model, in microseconds",
        settings=(EngineConfig, ForwardSettings),
        run=_late("forward", "bench_forward"),
        **MODEL,
    ),
    "compare": Command(
        help="put two results of a benchmark side by side",
        settings=(CompareSettings,),
        run=_late("compare", "bench_compare"),
        argument="a",
        argument_help="a result's JSON file",
    ),
    "simulate": Command(
        help="send a trace through the scheduler on a virtual clock, without a GPU",
        settings=(SimulateSettings, DatasetSettings),
        run=_late("simulate", "bench_simulate"),
        argument=None,
    ),
    "startup": Command(
        help="time starts of the engine, cold and warm, until the first token",
        settings=(EngineConfig, StartupSettings),
        run=_late("startup", "bench_startup"),
        **MODEL,
    ),
    "kernels": Command(
        help="measure the kernels against their floors and other kernels",
        settings=(KernelBenchSettings,),
        run=_late("kernels", "bench_kernels"),
        argument=None,
    ),
}

PROFILE = Command(
    help="show where the time of steps goes, by operator class, or read a trace",
    settings=(EngineConfig, ProfileSettings),
    run=_late("command", "profile", "qserve.profile"),
    argument_optional=True,
    **MODEL,
)
