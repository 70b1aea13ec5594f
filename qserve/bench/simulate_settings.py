"""Settings of `qserve bench simulate`. Loads no torch."""

from dataclasses import dataclass

from formats.errors import InputError
from qserve.bench.serve_settings import METRICS, read_limits, read_metrics, read_percentiles
from qserve.setting import check_settings, setting

ROUTERS = ("round-robin", "random", "least-outstanding", "prefix", "prefix-load")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateSettings:
    """A server that is not there: its scheduler, its pages, the times of its steps."""

    trace: str | None = setting(
        None,
        "file of requests with their times (BurstGPT, Azure, Mooncake, Vidur, or a detailed result"
        " of `bench serve`); default: --dataset-name and --request-rate",
    )
    steps: str | None = setting(None, "result of `bench forward`: how long steps take")
    step_ms: float | None = setting(None, "in place of --steps: every step takes this long", low=0)
    num_pages: int = setting(30_000, "KV pages", low=1)
    block_size: int = setting(16, "tokens of one KV page", low=1)
    max_num_seqs: int = setting(256, "most requests in one step", low=1)
    max_num_batched_tokens: int = setting(8192, "token budget of one step", low=1)
    scheduling_policy: str = setting("fcfs", "as `qserve serve` takes it")
    prefill_batch_size: int = setting(1, "prompts that the policy controlled takes together", low=1)
    prefix_caching: bool = setting(
        False, "find KV pages of earlier prompts: with traces that say which prompts are alike"
    )
    sync_scheduling: bool = setting(False, "plan no step while another runs")
    request_overhead_ms: float = setting(
        0.0, "what the server adds to a request before its first step", low=0
    )
    request_rate: float = setting(float("inf"), "requests a second, without a trace", low=0)
    burstiness: float = setting(1.0, "as `bench serve` takes it", low=0)
    max_concurrency: int | None = setting(None, "most requests under way", low=1)
    seed: int = setting(0, "of lengths, times and the router", low=0)
    replicas: int = setting(1, "servers behind the router", low=1)
    router: str = setting("round-robin", "which of them a request goes to", ROUTERS)
    find_max_rate: bool = setting(
        False, "look for the highest --request-rate at which 99 of 100 requests meet --goodput"
    )
    percentile_metrics: str = setting("ttft,tpot,itl,e2el", f"some of {','.join(METRICS)}")
    metric_percentiles: str = setting("50,90,99", "percentiles of them")
    goodput: list[str] = setting([], "limits in milliseconds: ttft:500 tpot:30", many=True)
    output_json: str | None = setting(None, "file for the result, with the keys of `bench serve`")

    def __post_init__(self) -> None:
        check_settings(self)
        _ = self.metrics, self.percentiles, self.limits_ms
        if (self.steps is None) == (self.step_ms is None):
            raise InputError("--steps", "expected either --steps or --step-ms")
        if self.find_max_rate and (not self.goodput or self.trace is not None):
            raise InputError("--find-max-rate", "expected --goodput, and no --trace")

    @property
    def metrics(self) -> tuple[str, ...]:
        return read_metrics(self.percentile_metrics)

    @property
    def percentiles(self) -> tuple[float, ...]:
        return read_percentiles(self.metric_percentiles)

    @property
    def limits_ms(self) -> dict[str, float]:
        return read_limits("--goodput", self.goodput)
