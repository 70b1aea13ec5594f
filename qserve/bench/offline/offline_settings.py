"""Settings of the benchmarks without a server: latency, throughput, startup. Loads no torch."""

from dataclasses import dataclass

from qserve.command_line.setting import check_settings, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySettings:
    """Settings of `bench latency`, which runs one static batch repeatedly.

    Names and defaults are those of vLLM.
    """

    input_len: int = setting(32, "prompt length of each request in tokens", low=1)
    output_len: int = setting(128, "output length of each request in tokens", low=1)
    batch_size: int = setting(8, "number of requests in the batch", low=1)
    n: int = setting(1, "number of outputs per request", low=1)
    num_iters_warmup: int = setting(10, "warm-up iterations, not measured", low=0)
    num_iters: int = setting(30, "number of measured iterations", low=1)
    disable_detokenize: bool = setting(False, "do not detokenize the output")
    profile: bool = setting(False, "profile one more iteration (like `qserve profile`)")
    profile_dir: str = setting("profile", "folder for --profile's trace and table")
    output_json: str | None = setting(None, "output file of the result")

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputSettings:
    """Settings of `bench throughput`, which runs all requests together. Names are those of vLLM."""

    n: int = setting(1, "number of outputs per request", low=1)
    num_warmups: int = setting(0, "warm-up requests, not measured", low=0)
    disable_detokenize: bool = setting(False, "do not detokenize the output")
    disable_tqdm: bool = setting(False, "no progress bar")
    profile: bool = setting(False, "profile the run (like `qserve profile`)")
    profile_dir: str = setting("profile", "folder for --profile's trace and table")
    output_json: str | None = setting(None, "output file of the result")

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupSettings:
    """Settings of `bench startup`, which starts separate processes up to the first token."""

    num_iters_cold: int = setting(3, "cold starts, with an empty cache of compiled kernels", low=1)
    num_iters_warmup: int = setting(1, "starts before the warm ones, not measured", low=0)
    num_iters_warm: int = setting(
        3, "warm starts, with kernels compiled by an earlier start", low=1
    )
    input_len: int = setting(128, "prompt length of the first request in tokens", low=1)
    output_json: str | None = setting(None, "output file of the result")

    def __post_init__(self) -> None:
        check_settings(self)
