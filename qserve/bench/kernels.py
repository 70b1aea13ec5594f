"""`qserve bench kernels`: compare kernels with their roofline and with other kernels.

The results are a table or JSON.
"""

import json
import sys

from qkernels.bench.measure import HEADER, Result, format_result, plot
from qkernels.bench.table import run, run_tune, versions
from qkernels.bench.tune import format_tuned
from qserve.bench.kernel_settings import KernelBenchSettings


def bench_kernels(config: KernelBenchSettings) -> int:
    """Run `bench kernels`. Raises KernelError if there is no GPU."""
    if config.tune:
        path = run_tune(
            op=config.op,
            shape=config.shape,
            m=config.m,
            seconds=config.tune_seconds,
            show=lambda tuned: print(
                json.dumps(tuned.to_dict()) if config.json else format_tuned(tuned), flush=True
            ),
        )
        print(f"Wrote {path}, which the kernels now use", file=sys.stderr)
        return 0
    shown = []

    def show(result: Result) -> None:
        if config.json:
            print(json.dumps(result.to_dict()), flush=True)
            return
        if not shown:
            print(f"{versions()}\n{HEADER}  error")
        shown.append(result)
        print(format_result(result), flush=True)

    results = run(op=config.op, shape=config.shape, m=config.m, baseline=config.baseline, show=show)
    if config.plot:
        plot(results, config.plot)
    return 0
