"""Tile sizes of Mamba-1's kernel, in plain Python. Legend: see ops.py."""

from dataclasses import dataclass

from qkernels.gpu.config import power_of_two

TILE = 512  # numbers of a state per program, which one warp holds in registers


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanConfig:
    """Launch config of channel_scan_."""

    state: int  # N, padded to a power of two
    channels: int  # channels per program
    warps: int


def scan_config(N: int) -> ScanConfig:
    """Return the config, which does not depend on the number of rows.

    One warp has few channels, so that sums over N stay within the warp and many programs fit.
    """
    state = max(8, power_of_two(N))
    return ScanConfig(state=state, channels=max(8, TILE // state), warps=1)
