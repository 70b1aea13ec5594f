"""W4A8 as a tunable operation: the configs of both kernel variants, and where a search starts."""

import torch

from qkernels.gpu import device as gpu_device
from qkernels.tuning.op import ConfigSpace, TunedOp, both_reductions
from qkernels.w4a8.config import (
    W4A8Sm90Config,
    W4A8TritonConfig,
    default_sm90_config,
    default_triton_config,
    sm90_config_fault,
    sm90_search_starts,
    triton_config_fault,
)
from qkernels.w4a8.layout import K_STEP, k_step

MAX_SEARCH_ROWS = 1024  # with more rows, a search starts only from the problem's own default
W4A8Config = W4A8TritonConfig | W4A8Sm90Config


def _runs_sm90(K: int) -> bool:
    return K % K_STEP == 0 and gpu_device.lacks_arch(torch.device("cuda"), "sm_90") is None


def _default(sm_count: int, *, M: int, N: int, K: int, group: int, integers: bool) -> W4A8Config:
    if _runs_sm90(K):
        return default_sm90_config(M, N, K, group, sm_count, integers)
    return default_triton_config(M, N, K, k_step(group), sm_count)


def _starts(
    sm_count: int, *, M: int, N: int, K: int, group: int, integers: bool
) -> list[W4A8Config]:
    """Return the defaults for twice and half as many rows; on sm_90 also a config of each size."""
    found = [
        _default(sm_count, M=other, N=N, K=K, group=group, integers=integers)
        for other in (min(2 * M, MAX_SEARCH_ROWS), max(1, M // 2))
    ]
    return found + (sm90_search_starts(M, K, group, integers) if _runs_sm90(K) else [])


TUNED = TunedOp(
    name="w4a8",
    configs={
        W4A8TritonConfig: ConfigSpace(
            fault=triton_config_fault,
            options={
                "split": (1, 2, 3, 4, 6, 8),
                "block_m": (16, 32, 64, 128),
                "block_n": (64, 128),
                "stages": (2, 3, 4, 5, 6),
                "warps": (4, 8),
                "pdl": (False, True),
                "use_tma": (False, True),
            },
        ),
        W4A8Sm90Config: ConfigSpace(
            fault=sm90_config_fault,
            options={
                "num_consumers": (1, 2, 3),
                "block_b": (16, 32, 64, 128, 256),
                "split": (1, 2, 3, 4, 5, 6, 7, 8, 12, 16),
                "blocks_per_sm": (1, 2),
                "max_stages": (3, 4, 6, 8, 12),
                "max_prefetch_stages": (2, 4, 8),
                "launch_dependents_first": (False, True),
                "loads_ahead": (False, True),
                "store_stages": (1, 2),
                "group_a": (8, 16),
            },
            changed=both_reductions,
            fits=lambda config, problem, sm_count: config.fits(
                problem["M"], problem["N"], problem["K"], sm_count
            ),
        ),
    },
    exact=("N", "K", "group", "integers"),
    bucketed=("M",),
    default=_default,
    starts=_starts,
)
