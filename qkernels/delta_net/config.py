"""Tiles of the gated delta net's kernels, in plain Python. Legend as in ops.py."""

from dataclasses import dataclass

import torch

from qkernels.gpu.config import power_of_two
from qkernels.problem import HALF_DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvConfig:
    channels: int  # of a program, which takes all rows of one request
    rows: int  # at once
    warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaConfig:
    keys: int  # K, as a power of two
    columns: int  # of a head's state in one program: of its values
    rows: int  # of a chunk; 1: a request has no more, and nothing is multiplied by tiles
    warps: int
    precision: str  # of products


def conv_config(max_query_len: int) -> ConvConfig:
    """Many channels of the one row that each request has, or few of many rows."""
    if max_query_len == 1:
        return ConvConfig(channels=256, rows=1, warps=4)
    return ConvConfig(channels=64, rows=32, warps=4)


def delta_config(max_query_len: int, K: int, V: int, dtype: torch.dtype) -> DeltaConfig:
    """32 columns of 128 keys are 16 KiB: the state stays in registers, and 128 programs of 32 heads
    fill a GPU at one request."""
    keys = max(16, power_of_two(K))
    columns = max(16, min(32, power_of_two(V)))
    precision = "tf32" if dtype in HALF_DTYPES else "ieee"
    rows = 1 if max_query_len == 1 else 32
    return DeltaConfig(keys=keys, columns=columns, rows=rows, warps=4, precision=precision)
