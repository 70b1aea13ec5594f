"""Settings of the benchmarks in one process: latency, throughput, startup. Loads no torch."""

from dataclasses import dataclass

from qserve.setting import check_settings, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySettings:
    """One static batch, again and again. Names and defaults are vLLM's."""

    input_len: int = setting(32, "prompt tokens of each request", low=1)
    output_len: int = setting(128, "output tokens of each request", low=1)
    batch_size: int = setting(8, "requests at once", low=1)
    n: int = setting(1, "outputs of each request", low=1)
    num_iters_warmup: int = setting(10, "iterations before those that count", low=0)
    num_iters: int = setting(30, "iterations that count", low=1)
    disable_detokenize: bool = setting(False, "do not turn the tokens into text")
    profile: bool = setting(False, "profile one more iteration (as `qserve profile` does)")
    profile_dir: str = setting("profile", "folder of --profile's trace and table")
    output_json: str | None = setting(None, "file for the result")

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputSettings:
    """All requests at once, in this process. Names are vLLM's."""

    n: int = setting(1, "outputs of each request", low=1)
    num_warmups: int = setting(0, "requests that are run first and not counted", low=0)
    disable_detokenize: bool = setting(False, "do not turn the tokens into text")
    disable_tqdm: bool = setting(False, "no progress bar")
    profile: bool = setting(False, "profile it (as `qserve profile` does)")
    profile_dir: str = setting("profile", "folder of --profile's trace and table")
    output_json: str | None = setting(None, "file for the result")

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupSettings:
    """Starts of a process of its own, until the first token."""

    num_iters_cold: int = setting(3, "starts with no compiled kernels kept", low=1)
    num_iters_warmup: int = setting(1, "starts before the warm ones, not counted", low=0)
    num_iters_warm: int = setting(3, "starts with the kernels that an earlier one compiled", low=1)
    input_len: int = setting(128, "prompt tokens of the first request", low=1)
    output_json: str | None = setting(None, "file for the result")

    def __post_init__(self) -> None:
        check_settings(self)
