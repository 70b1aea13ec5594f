"""Settings of `qserve profile`."""

from dataclasses import dataclass

from qserve.command_line.setting import check_settings, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSettings:
    """The steps to profile, or the trace to analyse."""

    case: list[str] = setting(
        [], "steps, as `qserve bench forward --case` takes them: decode=32*1@4096", many=True
    )
    iters: int = setting(10, "replays of each case", low=1)
    with_stack: bool = setting(False, "record Python stacks as well; launches become slower")
    profile_dir: str = setting("profile", "folder of the traces and tables")
    profiler: str = setting(
        "torch",
        "torch: a trace and its table; cuda: only cudaProfilerStart and NVTX ranges, for nsys"
        " profile --capture-range=cudaProfilerApi --cuda-graph-trace=node",
        ("torch", "cuda"),
    )
    trace: str | None = setting(
        None, "read this Chrome trace instead of running the model; needs no GPU"
    )
    with_trace: str | None = setting(
        None, "also read this trace, and print how it differs from --trace"
    )

    def __post_init__(self) -> None:
        check_settings(self)
