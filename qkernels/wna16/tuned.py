"""W4A16 and W8A16 as a tunable operation: configs of all variants, and where a search starts."""

import dataclasses

import torch

from formats.scheme import QuantSpec
from qkernels.tuning.op import ConfigSpace, TunedOp
from qkernels.wna16.sm90_gemv_imma_config import GemvImmaConfig, gemv_config_fault
from qkernels.wna16.sm90_large_m_config import LARGE_M_SPLITS, LargeMConfig, large_m_config_fault
from qkernels.wna16.sm90_small_m_config import SMALL_M_ROWS, SmallMConfig, small_m_config_fault
from qkernels.wna16.triton_config import MAX_FUSED_ROWS, TritonGemmConfig, triton_config_fault
from qkernels.wna16.variants import VARIANTS, Shape, WNA16Config, default_config


def _shape(sm_count: int, *, N: int, K: int, group: int, bits: int) -> Shape:
    spec = QuantSpec(bits=bits, symmetric=True, group_size=group)
    return Shape.on(torch.device("cuda"), N=N, K=K, spec=spec, sm_count=sm_count)


def _default(sm_count: int, *, M: int, **weight: int) -> WNA16Config | None:
    return _for_all_rows(default_config(_shape(sm_count, **weight), M), sm_count)


def _for_all_rows(config: WNA16Config | None, sm_count: int) -> WNA16Config | None:
    """Widen the grid to all SMs: a table's config serves all rows of a bucket."""
    if isinstance(config, LargeMConfig):
        return dataclasses.replace(config, blocks=sm_count)
    return config


def _starts(sm_count: int, *, M: int, **weight: int) -> list[WNA16Config | None]:
    """Return the defaults for twice and half as many rows, and a config of each variant.

    A config that is slower on the GPU of the defaults may be faster on this GPU.
    """
    shape = _shape(sm_count, **weight)
    found = [default_config(shape, other) for other in (min(2 * M, MAX_FUSED_ROWS), max(1, M // 2))]
    runnable = [variant for variant in VARIANTS if variant.refuses(shape) is None]
    found += [variant.default(shape, M, True) for variant in runnable]
    if any(variant.config is LargeMConfig for variant in runnable):
        found.append(
            LargeMConfig(blocks=sm_count, bits=shape.spec.bits, block_m=64 if M <= 64 else 128)
        )
    found = [_for_all_rows(config, sm_count) for config in found if config is not None]
    return found + ([None] if M >= 256 else [])


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
        LargeMConfig: ConfigSpace(  # `blocks` follows from the problem and the GPU
            fault=large_m_config_fault,
            options={
                "num_consumers": (2, 3),
                "block_m": (64, 128, 256),
                "split": LARGE_M_SPLITS,
                "tail_split": (False, True),
            },
        ),
        GemvImmaConfig: ConfigSpace(
            fault=gemv_config_fault,
            options={"block_n": (16, 32, 64), "warps": (4, 8, 16), "steps_in_flight": (1, 2, 3, 4)},
        ),
        SmallMConfig: ConfigSpace(
            fault=small_m_config_fault,
            options={
                "block_m": SMALL_M_ROWS,
                "split": (1, 2, 3, 4, 5, 6, 7, 8, 10, 12),
                "stages": (2, 3, 4, 5, 6),
                "blocks_per_sm": (1, 2),
                "launch_dependents_first": (False, True),
            },
        ),
    },
    exact=("N", "K", "group", "bits"),
    bucketed=("M",),
    default=_default,
    starts=_starts,
    can_be_none=True,
)
