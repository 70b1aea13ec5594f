"""Settings of `qserve bench sweep` and its parts. Loads no torch."""

from dataclasses import dataclass

from qserve.setting import REQUIRED, check_settings, setting

WORKLOADS = ("request_rate", "max_concurrency")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    """The product of settings of a server and of its benchmark."""

    bench_cmd: str = setting(REQUIRED, "the benchmark, such as: qserve bench serve --num-prompts 9")
    serve_cmd: str | None = setting(
        None, "the server to start for each of --serve-params; default: one that runs already"
    )
    serve_params: str | None = setting(
        None, 'JSON file: a list of flags and values, as [{"max-num-seqs": 8}, ...]'
    )
    bench_params: str | None = setting(None, "the same of the benchmark")
    workload_var: str | None = setting(
        None, "also vary this flag of the benchmark, as --workload-values says", WORKLOADS
    )
    workload_values: str | None = setting(None, "its values, as 1,2,4,8")
    num_runs: int = setting(3, "runs of each combination", low=1)
    output_dir: str = setting("results", "folder of the results")
    experiment_name: str | None = setting(None, "folder below it; default: the date")
    ready_timeout: float = setting(600.0, "seconds that a server may take to start", low=1)
    after_bench_cmd: str | None = setting(None, "command to run after each benchmark")
    dry_run: bool = setting(False, "print what would run")
    resume: bool = setting(False, "keep runs that are there already")

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotSettings:
    """What to draw of a sweep's results, or of some results of `bench serve`."""

    x: str = setting("request_rate", "key of the horizontal axis")
    y: list[str] = setting(
        [], "keys to draw over it; default: median_ttft_ms p99_ttft_ms median_tpot_ms", many=True
    )
    by: str = setting("label", "key whose values get a line each")
    gpus: int = setting(1, "GPUs of the server: the Pareto plot's throughput is for each", low=1)
    output: str = setting("sweep.png", "PNG file")

    def __post_init__(self) -> None:
        check_settings(self)
