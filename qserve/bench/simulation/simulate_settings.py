"""Settings of `qserve bench simulate`. Loads no torch."""

from dataclasses import dataclass

from formats.errors import InputError
from qserve.bench.serving.serve_settings import METRICS, MetricSettings
from qserve.command_line.setting import check_settings, setting

ROUTERS = ("round-robin", "random", "least-outstanding", "prefix", "prefix-load")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateSettings(MetricSettings):
    """Settings of `bench simulate`: the server's scheduler, pages and step times; the requests."""

    trace: str | None = setting(
        None,
        "trace file of requests with their times (BurstGPT, Azure, Mooncake, Vidur, or a "
        "detailed result of `bench serve`); default: requests of --dataset-name at --request-rate",
    )
    steps: str | None = setting(
        None, "file with the result of `bench forward`, to which step times are fitted"
    )
    step_ms: float | None = setting(
        None, "constant time of a step in milliseconds, instead of --steps", low=0
    )
    num_pages: int = setting(30_000, "number of KV pages", low=1)
    block_size: int = setting(16, "number of tokens in one KV page", low=1)
    max_num_seqs: int = setting(256, "maximum number of requests in one step", low=1)
    max_num_batched_tokens: int = setting(8192, "token budget of one step", low=1)
    scheduling_policy: str = setting("fcfs", "scheduling policy, as in `qserve serve`")
    admission: str = setting(
        "forecast", "when requests are admitted, as in `qserve serve`", ("forecast", "fits")
    )
    max_tokens: int | None = setting(
        None,
        "max_tokens of each request, as the scheduler sees it, even if the output ends earlier; "
        "default: the length of its output",
        low=1,
    )
    prefill_batch_size: int = setting(
        1, "number of prompts that the scheduling policy controlled computes together", low=1
    )
    prefix_caching: bool = setting(
        False,
        "reuse KV pages of earlier prompts; a --trace must then state which prompts share a "
        "prefix, as Mooncake's traces do",
    )
    sync_scheduling: bool = setting(False, "do not plan a step while another one runs")
    request_overhead_ms: float = setting(
        0.0, "milliseconds that the server takes for each request before its first step", low=0
    )
    request_rate: float = setting(
        float("inf"), "requests per second, where there is no --trace", low=0
    )
    burstiness: float = setting(
        1.0, "shape of the distribution of intervals, as in `bench serve`", low=0
    )
    max_concurrency: int | None = setting(None, "maximum number of requests in progress", low=1)
    seed: int = setting(0, "random seed of lengths, times and the router", low=0)
    replicas: int = setting(1, "number of servers behind the router", low=1)
    router: str = setting("round-robin", "how the router chooses a server", ROUTERS)
    find_max_rate: bool = setting(
        False, "search for the highest --request-rate at which 99 of 100 requests meet --goodput"
    )
    percentile_metrics: str = setting(
        "ttft,tpot,itl,e2el", f"metrics to report, some of {','.join(METRICS)}"
    )
    metric_percentiles: str = setting("50,90,99", "percentiles to report, such as 50,90,99")
    goodput: list[str] = setting([], "limits in milliseconds, such as ttft:500 tpot:30", many=True)
    output_json: str | None = setting(
        None, "output file of the result, with the keys of `bench serve`"
    )

    def __post_init__(self) -> None:
        check_settings(self)
        _ = self.metrics, self.percentiles, self.limits_ms
        if (self.steps is None) == (self.step_ms is None):
            raise InputError(
                "--steps",
                "expected either --steps or --step-ms, which say how long a step takes",
                "give one of them",
            )
        if self.find_max_rate and (not self.goodput or self.trace is not None):
            raise InputError(
                "--find-max-rate",
                "requires --goodput, and no --trace",
                "add --goodput, and leave --trace out",
            )
