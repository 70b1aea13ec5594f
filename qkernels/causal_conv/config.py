"""Tile sizes of the convolution kernel, in plain Python."""

from dataclasses import dataclass

from qkernels.gpu.config import power_of_two


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvConfig:
    """Launch config of a convolution."""

    channels: int  # channels of a program
    rows: int  # rows of a program, all of one request
    warps: int


def conv_config(max_query_len: int, most_rows: int) -> ConvConfig:
    """Return the config: many channels if requests have one row, else fewer channels and more rows.

    `most_rows` are the rows of the longest verification; all verifications use one kernel.
    """
    if max_query_len == 1:
        return ConvConfig(channels=256, rows=1, warps=4)
    if max_query_len <= most_rows <= 8:
        return ConvConfig(channels=128, rows=power_of_two(most_rows), warps=4)
    return ConvConfig(channels=128, rows=16, warps=4)
