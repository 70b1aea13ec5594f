"""Settings of `qserve profile`."""

from dataclasses import dataclass

from qserve.command_line.setting import check_settings, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSettings:
    """The steps to profile, or the trace to analyse."""

    case: list[str] = setting(
        [], "steps to profile, as for `qserve bench forward --case`: decode=32*1@4096", many=True
    )
    iters: int = setting(10, "replays of each case", low=1)
    with_stack: bool = setting(False, "also record Python stacks; this makes launches slower")
    profile_dir: str = setting("profile", "folder for traces and tables")
    profiler: str = setting(
        "torch",
        "torch: write a trace and a table; cuda: only call cudaProfilerStart and emit NVTX ranges,"
        " for nsys profile --capture-range=cudaProfilerApi --cuda-graph-trace=node",
        ("torch", "cuda"),
    )
    trace: str | None = setting(
        None, "analyse this Chrome trace instead of running the model; needs no GPU"
    )
    with_trace: str | None = setting(
        None, "also read this trace, and print its difference from --trace"
    )

    def __post_init__(self) -> None:
        check_settings(self)
