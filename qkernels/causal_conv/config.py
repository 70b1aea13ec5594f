"""Tiles of the convolutions' kernel, in plain Python."""

from dataclasses import dataclass

from qkernels.gpu.config import power_of_two


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvConfig:
    """One launch of a convolution."""

    channels: int  # of a program
    rows: int  # of a program, all of one request
    warps: int


def conv_config(max_query_len: int, most_rows: int) -> ConvConfig:
    """Many channels of the few rows that each request has, or fewer of 16 rows.

    `most_rows`: of a verification; all verifications take one kernel.
    """
    if max_query_len == 1:
        return ConvConfig(channels=256, rows=1, warps=4)
    if max_query_len <= most_rows <= 8:
        return ConvConfig(channels=128, rows=power_of_two(most_rows), warps=4)
    return ConvConfig(channels=128, rows=16, warps=4)
