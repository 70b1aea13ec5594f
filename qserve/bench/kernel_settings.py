"""Settings of `qserve bench kernels`. Loads no torch."""

from dataclasses import dataclass

from qserve.command_line.setting import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBenchSettings:
    """Settings of `qserve bench kernels`; lists are comma-separated."""

    op: str | None = setting(None, "operations, such as w4a16,paged_attention; default: all")
    shape: str | None = setting(
        None,
        "shapes, such as qkv,gate_up or 896x4864 (outputs x inputs; for attention: keys x "
        "query rows); default: all shapes of each operation",
    )
    m: str | None = setting(
        None, "numbers of rows (for attention: of requests), such as 1,16; default: a built-in list"
    )
    baseline: str | None = setting(
        None,
        "kernels to compare with, such as cublas,int_mm,gemlite, or none; default: all "
        "installed ones",
    )
    json: bool = setting(False, "print one JSON object per line")
    plot: str | None = setting(None, "also plot the times to this PNG file")
    tune: bool = setting(
        False,
        "measure other tile sizes on this GPU and write a table of the faster ones, which "
        "the kernels then use",
    )
    tune_seconds: float = setting(600.0, "time limit of --tune")
