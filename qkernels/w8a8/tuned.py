"""W8A8 as a tunable operation: the configs of both kernel variants, and where a search starts."""

import torch

from qkernels.gpu import device as gpu_device
from qkernels.tuning.op import ConfigSpace, TunedOp, both_reductions
from qkernels.w8a8.config import (
    SM90_IDLE_ROWS,
    SM90_SPLITS,
    W8A8Sm90Config,
    W8A8TritonConfig,
    default_sm90_config,
    default_w8a8_triton_config,
    sm90_search_starts,
    w8a8_sm90_config_fault,
    w8a8_triton_config_fault,
    without_tma,
)

MAX_SEARCH_ROWS = 1024  # with more rows, a search starts only from the problem's own default
W8A8Config = W8A8TritonConfig | W8A8Sm90Config


def _runs_sm90() -> bool:
    return gpu_device.lacks_arch(torch.device("cuda"), "sm_90") is None


def _default(sm_count: int, *, M: int, N: int, K: int, integers: bool) -> W8A8Config:
    if _runs_sm90():
        return default_sm90_config(M, N, K, sm_count, "int" if integers else "float")
    config = default_w8a8_triton_config(M, N, K, sm_count, integers)
    return config if gpu_device.has_tma(torch.device("cuda")) else without_tma(config)


def _starts(sm_count: int, *, M: int, N: int, K: int, integers: bool) -> list[W8A8Config]:
    """Return the defaults for twice and half as many rows; on sm_90 also a config of each size."""
    found = [
        _default(sm_count, M=other, N=N, K=K, integers=integers)
        for other in (min(2 * M, MAX_SEARCH_ROWS), max(1, M // 2))
    ]
    return found + (sm90_search_starts(M, integers) if _runs_sm90() else [])


TUNED = TunedOp(
    name="w8a8",
    configs={
        W8A8TritonConfig: ConfigSpace(
            fault=w8a8_triton_config_fault,
            options={
                "split": (1, 2, 3, 4),
                "block_m": (16, 32, 64, 128, 256),
                "block_n": (32, 64, 128, 256),
                "block_k": (64, 128, 256),
                "stages": (3, 4, 5, 6),
                "warps": (4, 8),
                "weight_is_a": (False, True),
                "use_tma": (False, True),
                "pdl": (False, True),
            },
        ),
        W8A8Sm90Config: ConfigSpace(
            fault=w8a8_sm90_config_fault,
            options={
                "num_consumers": (1, 2, 3),
                "block_b": (16, 32, 64, 128, 256),
                "consumer_rows": (64, 128),
                "weight_is_a": (False, True),
                "idle_rows": SM90_IDLE_ROWS,
                "split": SM90_SPLITS,
                "blocks_per_sm": (1, 2),
                "max_prefetch_stages": (2, 4, 8, 24),
                "store_stages": (1, 2),
                "group_a": (8, 16),
            },
            changed=both_reductions,
            fits=lambda config, problem, sm_count: config.fits(
                problem["M"], problem["N"], sm_count
            ),
        ),
    },
    exact=("N", "K", "integers"),
    bucketed=("M",),
    default=_default,
    starts=_starts,
)
