"""Settings of `qserve bench serve`: server, requests, metrics. Loads no torch."""

import math
from dataclasses import dataclass

from formats.errors import InputError
from qserve.command_line.setting import check_settings, setting
from qserve.errors import LEAVE_OUT

BACKENDS = ("openai", "openai-chat", "vllm", "vllm-chat", "sglang", "sglang-oai", "qserve")
RAMP_UPS = ("linear", "exponential")
METRICS = ("ttft", "tpot", "itl", "e2el")


class MetricSettings:
    """Base class of settings that select metrics, percentiles and limits."""

    __slots__ = ()
    percentile_metrics: str
    metric_percentiles: str
    goodput: list[str]

    @property
    def metrics(self) -> tuple[str, ...]:
        return read_metrics(self.percentile_metrics)

    @property
    def percentiles(self) -> tuple[float, ...]:
        return read_percentiles(self.metric_percentiles)

    @property
    def limits_ms(self) -> dict[str, float]:
        """A table: metric -> its limit."""
        return read_limits("--goodput", self.goodput)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBenchSettings(MetricSettings):
    """Settings of `bench serve`. Names and defaults are those of vLLM, unless the help differs."""

    model: str | None = None  # positional or --model; None: the first of /v1/models
    backend: str = setting(
        "openai",
        "type of server; -chat uses /v1/chat/completions, the others /v1/completions",
        BACKENDS,
    )
    base_url: str | None = setting(
        None, "URL of the server, such as http://host:8000; overrides --host and --port"
    )
    host: str = setting("127.0.0.1", "address of the server")
    port: int = setting(8000, "port of the server", low=0, high=2**16 - 1)
    endpoint: str | None = setting(None, "path of the route; default: depends on --backend")
    header: list[str] = setting([], "KEY=VALUE of a header to send", many=True)
    api_key: str | None = setting(
        None, "API key, sent as a Bearer token; default: OPENAI_API_KEY from the environment"
    )
    insecure: bool = setting(False, "do not check the certificate of an https server")
    served_model_name: str | None = setting(
        None, "model name in requests; default: the same as --model"
    )
    request_rate: float = setting(
        math.inf, "requests per second; inf: as fast as --max-concurrency allows", above=0
    )
    burstiness: float = setting(
        1.0,
        "shape of the gamma distribution of the intervals between requests: 1 is a Poisson "
        "process, less is burstier, inf means equal intervals",
        above=0,
    )
    ramp_up_strategy: str | None = setting(
        None, "how the rate rises from --ramp-up-start-rps to --ramp-up-end-rps", RAMP_UPS
    )
    ramp_up_start_rps: float | None = setting(None, "requests per second at the start", low=0)
    ramp_up_end_rps: float | None = setting(None, "requests per second at the end", low=0)
    max_concurrency: int | None = setting(
        None,
        "maximum number of requests in progress; latency is measured from the actual send",
        low=1,
    )
    num_warmups: int = setting(0, "warm-up requests, not measured", low=0)
    ready_check_timeout_sec: float = setting(
        0.0, "seconds to wait until the server completes a test request; 0: send none", low=0
    )
    request_timeout: float = setting(
        6 * 3600.0, "seconds after which a request counts as failed", low=0
    )
    seed: int = setting(0, "random seed of prompts, lengths and times", low=0)
    ignore_eos: bool = setting(
        False,
        "generate all output tokens regardless of end tokens; default for synthetic data sets",
    )
    disable_ignore_eos: bool = setting(
        False, "let outputs end at an end token also for synthetic data sets"
    )
    logprobs: int | None = setting(None, "number of log probabilities to request per token", low=0)
    temperature: float = setting(0.0, "sampling temperature", low=0)
    top_p: float | None = setting(None, "top-p; default: the server's")
    top_k: int | None = setting(None, "top-k; default: the server's")
    min_p: float | None = setting(None, "min-p; default: the server's")
    frequency_penalty: float | None = setting(None, "frequency penalty; default: the server's")
    presence_penalty: float | None = setting(None, "presence penalty; default: the server's")
    repetition_penalty: float | None = setting(None, "repetition penalty; default: the server's")
    extra_body: str | None = setting(None, "JSON object of fields that are added to each request")
    percentile_metrics: str = setting(
        "ttft,tpot,itl", "metrics to report, some of ttft,tpot,itl,e2el"
    )
    metric_percentiles: str = setting("99", "percentiles to report, such as 50,90,99")
    goodput: list[str] = setting(
        [],
        "limits in milliseconds, such as ttft:500 tpot:30 e2el:5000; reports the number of "
        "requests per second that meet all of them",
        many=True,
    )
    save_result: bool = setting(False, "write the result as JSON")
    save_detailed: bool = setting(False, "also save the numbers and texts of every request")
    append_result: bool = setting(
        False, "append the result to the file as a line, instead of overwriting it"
    )
    result_dir: str | None = setting(None, "folder of the result; default: the current one")
    result_filename: str | None = setting(
        None, "file name of the result; default: made from label, rate, concurrency, model and date"
    )
    label: str | None = setting(None, "name of this run in the result; default: the backend")
    metadata: list[str] = setting([], "KEY=VALUE to add to the result", many=True)
    profile: bool = setting(
        False,
        "send /start_profile before and /stop_profile after the run (the server needs "
        "--profiler-config)",
    )
    disable_tqdm: bool = setting(False, "no progress bar")

    def __post_init__(self) -> None:
        check_settings(self)
        _ = self.metrics, self.percentiles, self.limits_ms, self.headers
        ramp = (self.ramp_up_start_rps, self.ramp_up_end_rps)
        if self.ramp_up_strategy is None and ramp != (None, None):
            raise InputError(
                "--ramp-up-start-rps",
                "requires --ramp-up-strategy",
                "add --ramp-up-strategy linear",
            )
        if self.ramp_up_strategy is not None:
            if None in ramp or math.isfinite(self.request_rate):
                raise InputError(
                    "--ramp-up-strategy",
                    "requires --ramp-up-start-rps and --ramp-up-end-rps, without --request-rate",
                    "give both rates, and leave --request-rate out",
                )
            if ramp[0] > ramp[1] or (self.ramp_up_strategy == "exponential" and ramp[0] <= 0):
                raise InputError(
                    "--ramp-up-start-rps",
                    "expected less than --ramp-up-end-rps, above 0 if exponential,"
                    f" found {ramp[0]}",
                    "give a lower first rate, or a higher last one",
                )

    @property
    def url(self) -> str:
        """The server's URL: scheme, host and port."""
        return (self.base_url or f"http://{self.host}:{self.port}").rstrip("/")

    @property
    def is_chat(self) -> bool:
        return self.backend.endswith("-chat")

    @property
    def path(self) -> str:
        if self.endpoint is not None:
            return self.endpoint
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    @property
    def headers(self) -> dict[str, str]:
        return read_pairs("--header", self.header)


def read_metrics(text: str) -> tuple[str, ...]:
    """Parse the metrics to report, and return them in the order of METRICS. Raises InputError."""
    asked = [name for name in text.split(",") if name]
    for name in asked:
        if name not in METRICS:
            raise InputError(
                "--percentile-metrics",
                f"expected some of {', '.join(METRICS)}, found {name!r}",
                LEAVE_OUT,
            )
    return tuple(name for name in METRICS if name in asked)


def read_percentiles(text: str) -> tuple[float, ...]:
    """Parse percentiles such as 50,99.9. Raises InputError."""
    try:
        found = tuple(float(each) for each in text.split(",") if each)
    except ValueError:
        found = (-1.0,)
    if not all(0 <= each <= 100 for each in found):
        raise InputError(
            "--metric-percentiles",
            f"expected numbers from 0 to 100, found {text!r}",
            "write them as 50,95,99",
        )
    return found


def read_limits(flag: str, texts: list[str]) -> dict[str, float]:
    """Parse limits such as ttft:500. Raises InputError."""
    limits = {}
    for text in (each for entry in texts for each in entry.split(",")):
        name, _, value = text.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            name = ""
        if name not in ("ttft", "tpot", "e2el"):
            raise InputError(
                flag,
                f"expected ttft:MS, tpot:MS or e2el:MS, found {text!r}",
                "write for example ttft:500",
            )
    return limits


def read_pairs(flag: str, texts: list[str]) -> dict[str, str]:
    """Parse KEY=VALUE pairs. Raises InputError."""
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise InputError(
                flag, f"expected KEY=VALUE, found {text!r}", f"write {flag} KEY=VALUE for each pair"
            )
        pairs[name] = value
    return pairs
