"""Settings of `qserve bench sweep` and its parts. Loads no torch."""

import shlex
from dataclasses import dataclass

from formats.errors import InputError
from qserve.command_line.setting import REQUIRED, check_settings, setting

WORKLOADS = ("request_rate", "max_concurrency")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    """Settings of `bench sweep serve`, which combines settings of a server and of its benchmark."""

    bench_cmd: str = setting(
        REQUIRED, "the benchmark to run, such as: qserve bench serve --num-prompts 9"
    )
    serve_cmd: str | None = setting(
        None,
        "command that starts a server for each entry of --serve-params; default: use a server "
        "that already runs",
    )
    serve_params: str | None = setting(
        None,
        'JSON file with a list of flags and values for the server, such as [{"max-num-seqs": 8}, '
        "...]",
    )
    bench_params: str | None = setting(None, "JSON file with such a list for the benchmark")
    workload_var: str | None = setting(
        None, "also vary this flag of the benchmark over --workload-values", WORKLOADS
    )
    workload_values: str | None = setting(None, "values of --workload-var, such as 1,2,4,8")
    num_runs: int = setting(3, "runs per combination", low=1)
    output_dir: str = setting("results", "folder of the results")
    experiment_name: str | None = setting(None, "sub-folder of this sweep; default: the date")
    ready_timeout: float = setting(600.0, "seconds that a server may take to start", low=1)
    after_bench_cmd: str | None = setting(None, "command to run after each benchmark")
    dry_run: bool = setting(False, "print the commands without running them")
    resume: bool = setting(False, "do not repeat runs whose results exist")

    def __post_init__(self) -> None:
        check_settings(self)
        for flag in ("bench_cmd", "serve_cmd", "after_bench_cmd"):
            _check_command(f"--{flag.replace('_', '-')}", getattr(self, flag))


def _check_command(flag: str, command: str | None) -> None:
    """Raise InputError for a command without words, or with an open quotation mark."""
    try:
        words = ["-"] if command is None else shlex.split(command)
    except ValueError as error:
        raise InputError(
            flag, f"cannot be read as a command: {error}, in {command!r}", "close its quotes"
        ) from None
    if not words:
        raise InputError(
            flag,
            "expected a command, found none",
            "quote the whole command, such as 'qserve serve MODEL'",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotSettings:
    """Settings of plots of a sweep's results, or of results of `bench serve`."""

    x: str = setting("request_rate", "key of the horizontal axis")
    y: list[str] = setting(
        [],
        "keys of the vertical axis; default: median_ttft_ms p99_ttft_ms median_tpot_ms",
        many=True,
    )
    by: str = setting("label", "key for which each value has a line of its own")
    gpus: int = setting(
        1, "number of GPUs of the server, by which the Pareto plot divides the throughput", low=1
    )
    output: str = setting("sweep.png", "PNG file")

    def __post_init__(self) -> None:
        check_settings(self)
