"""Settings of `qserve bench kernels`. Loads no torch."""

from dataclasses import dataclass

from qserve.setting import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBenchSettings:
    """Lists are comma-separated."""

    op: str | None = setting(None, "operations, such as w4a16,paged_attention; default: all")
    shape: str | None = setting(
        None,
        "shapes, such as qkv,gate_up or 896x4864 (outputs x inputs; of attention, keys x query"
        " rows); default: all of each operation",
    )
    m: str | None = setting(None, "rows, or requests of attention, such as 1,16; default: a table")
    baseline: str | None = setting(
        None, "compare with these, such as cublas,int_mm,gemlite, or none; default: all installed"
    )
    json: bool = setting(False, "print one JSON object per line")
    plot: str | None = setting(None, "also draw the times into this PNG file")
    tune: bool = setting(
        False,
        "measure other tiles on this GPU and write a table of the faster ones, which the"
        " kernels then read",
    )
    tune_seconds: float = setting(600.0, "time limit of --tune")
