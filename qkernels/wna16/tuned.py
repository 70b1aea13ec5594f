"""W4A16 and W8A16 in the tuning table: configs of all variants, and where a search starts."""

import dataclasses

import torch

from qkernels.gpu import device as gpu_device
from qkernels.operands.limbs import LIMBS_MAX_ROWS
from qkernels.tuning.op import ConfigSpace, TunedOp
from qkernels.wna16.configs import WNA16Config, default_config
from qkernels.wna16.sm90_gemv_imma_config import GemvImmaConfig, gemv_config_fault
from qkernels.wna16.sm90_large_m_config import LARGE_M_SPLITS, LargeMConfig, large_m_config_fault
from qkernels.wna16.sm90_small_m_config import SMALL_M_ROWS, SmallMConfig, small_m_config_fault
from qkernels.wna16.triton_config import (
    MAX_FUSED_ROWS,
    TritonGemmConfig,
    default_triton_config,
    triton_config_fault,
)


def runs_gluon() -> bool:
    return torch.cuda.is_available() and gpu_device.lacks_gluon(torch.device("cuda")) is None


def _default(sm_count: int, **problem: int) -> WNA16Config | None:
    config = default_config(**problem, sm_count=sm_count, gluon=runs_gluon())
    return _for_all_rows(config, sm_count)


def _for_all_rows(config: WNA16Config | None, sm_count: int) -> WNA16Config | None:
    """A table holds a config for all rows of a bucket, each of which takes up to so many blocks."""
    if isinstance(config, LargeMConfig):
        return dataclasses.replace(config, blocks=sm_count)
    return config


def _starts(
    sm_count: int, *, M: int, N: int, K: int, group: int, bits: int
) -> list[WNA16Config | None]:
    """The choice for twice and half as many rows, and a config of each variant for many rows.

    What is slower on the GPU of the defaults may be faster on this one.
    """
    found = [
        _default(sm_count, M=other, N=N, K=K, group=group, bits=bits)
        for other in (min(2 * M, MAX_FUSED_ROWS), max(1, M // 2))
    ]
    found.append(default_triton_config(M, N, K, group, sm_count))
    if runs_gluon():
        found += [SmallMConfig(rows=rows) for rows in SMALL_M_ROWS if rows >= M][:1]
        if M > LIMBS_MAX_ROWS:
            block_m = 64 if M <= 64 else 128
            found.append(LargeMConfig(blocks=sm_count, bits=bits, block_m=block_m))
    if M >= 256:
        found.append(None)
    return found


TUNED = TunedOp(
    name="w4a16",
    configs={
        TritonGemmConfig: ConfigSpace(
            fault=triton_config_fault,
            options={
                "split": (1, 2, 3, 4, 6, 8, 10),
                "block_m": (16, 32, 64, 128),
                "block_n": (64, 128),
                "stages": (2, 3, 4, 5),
                "warps": (4, 8),
                "use_tma": (False, True),
                "pdl": (False, True),
            },
        ),
        LargeMConfig: ConfigSpace(  # its blocks follow from the problem and the GPU
            fault=large_m_config_fault,
            options={
                "parts": (2, 3),
                "block_m": (64, 128, 256),
                "split": LARGE_M_SPLITS,
                "halves": (False, True),
            },
        ),
        GemvImmaConfig: ConfigSpace(
            fault=gemv_config_fault,
            options={"block_n": (16, 32, 64), "warps": (4, 8, 16), "ahead": (1, 2, 3, 4)},
        ),
        SmallMConfig: ConfigSpace(
            fault=small_m_config_fault,
            options={
                "rows": SMALL_M_ROWS,
                "split": (1, 2, 3, 4, 5, 6, 7, 8, 10, 12),
                "stages": (2, 3, 4, 5, 6),
                "alone": (False, True),
                "launch_early": (False, True),
            },
        ),
    },
    exact=("N", "K", "group", "bits"),
    bucketed=("M",),
    default=_default,
    starts=_starts,
    can_be_none=True,
)
