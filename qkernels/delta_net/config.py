"""Tiles of the gated delta net's kernels, in plain Python. Legend as in ops.py."""

from dataclasses import dataclass

import torch

from qkernels.gpu.config import power_of_two
from qkernels.problem import HALF_DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvConfig:
    """One launch of causal_conv_."""

    channels: int  # of a program, which takes all rows of one request
    rows: int  # at once
    warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaConfig:
    """One launch of delta_rule_."""

    keys: int  # K, as a power of two
    columns: int  # of a head's state in one program: of its values
    rows: int  # of a chunk; 1: a request has no more, and nothing is multiplied by tiles
    warps: int
    precision: str  # of products


def conv_config(max_query_len: int) -> ConvConfig:
    """Many channels of the one row that each request has, or few of many rows."""
    if max_query_len == 1:
        return ConvConfig(channels=256, rows=1, warps=4)
    return ConvConfig(channels=64, rows=16, warps=4)


def delta_config(max_query_len: int, K: int, V: int, dtype: torch.dtype) -> DeltaConfig:
    """32 columns of 128 keys are 16 KiB: the state stays in registers, and 128 programs of 32 heads
    fill a GPU at one request. Chunks of more than 16 rows would not fit beside it, nor would 32
    columns in float32, whose products take no tensor cores.
    """
    keys, width = max(16, power_of_two(K)), max(16, power_of_two(V))
    if max_query_len == 1:
        return DeltaConfig(keys=keys, columns=min(32, width), rows=1, warps=4, precision="ieee")
    if dtype in HALF_DTYPES:
        return DeltaConfig(keys=keys, columns=min(32, width), rows=16, warps=4, precision="tf32")
    return DeltaConfig(keys=keys, columns=16, rows=16, warps=8, precision="ieee")
