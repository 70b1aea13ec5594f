"""Tiles of the convolutions' kernel, in plain Python."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvConfig:
    """One launch of a convolution."""

    channels: int  # of a program
    rows: int  # of a program, all of one request
    warps: int


def conv_config(max_query_len: int) -> ConvConfig:
    """Many channels of the one row that each request has, or fewer of 16 rows."""
    if max_query_len == 1:
        return ConvConfig(channels=256, rows=1, warps=4)
    return ConvConfig(channels=128, rows=16, warps=4)
