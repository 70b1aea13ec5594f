"""The kernel variants of W4A16 and W8A16, one row each, and which of them takes M rows.

Adding a variant is a module with `run`, a config, and a row. Plain Python, no tensors.
Legend: M rows of x, N outputs, K inputs.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from formats.scheme import QuantSpec
from qkernels.choice import KernelChoice
from qkernels.gpu import device as gpu_device
from qkernels.operands.limbs import K_STEP, LIMBS_MAX_ROWS
from qkernels.wna16.layout import k_step
from qkernels.wna16.sm90_gemv_imma_config import (
    GemvImmaConfig,
    default_gemv_config,
    limbs_pay,
)
from qkernels.wna16.sm90_large_m_config import LargeMConfig, default_large_m_config
from qkernels.wna16.sm90_small_m_config import (
    SMALL_M_ROWS,
    SmallMConfig,
    default_small_m_config,
)
from qkernels.wna16.triton_config import (
    MAX_FUSED_ROWS,
    TritonGemmConfig,
    default_triton_config,
    without_tma,
)

WNA16Config = TritonGemmConfig | GemvImmaConfig | SmallMConfig | LargeMConfig
ANY = KernelChoice()
# None where the variant cannot, or does not want to, take so many rows
Default = Callable[["Shape", int, bool], WNA16Config | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A weight, and the GPU it is on."""

    N: int
    K: int
    spec: QuantSpec
    sm_count: int
    lacks: tuple[tuple[str, str], ...] = ()  # (architecture, why this GPU does not run its kernels)
    has_tma: bool = True

    @classmethod
    def on(cls, device: torch.device, *, N: int, K: int, spec: QuantSpec, sm_count: int) -> "Shape":
        """The weight on a device."""
        reason = gpu_device.lacks_arch(device, "sm_90")
        return cls(
            N=N,
            K=K,
            spec=spec,
            sm_count=sm_count,
            lacks=() if reason is None else (("sm_90", reason),),
            has_tma=gpu_device.has_tma(device),
        )

    @property
    def group(self) -> int:
        return self.spec.group_length(self.K)

    def lacks_arch(self, arch: str | None) -> str | None:
        return dict(self.lacks).get(arch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One kernel that reads the prepacked weight."""

    name: str
    config: type | None  # None: there is nothing to choose
    rows: str  # for `explain`
    arch: str | None = None  # what it is written for; None: what Triton runs on
    bits: tuple[int, ...] = (4, 8)
    whole_k_steps: bool = False  # groups of inputs are divisible by 128
    default: Default
    adds_adapters: bool = False  # takes a LoraTerm

    def refuses(self, shape: Shape) -> str | None:
        """Why it runs no number of rows of this weight on this GPU; None: it runs some."""
        if shape.spec.bits not in self.bits:
            return f"takes {' and '.join(map(str, self.bits))} bits, not {shape.spec.bits}"
        if self.whole_k_steps and k_step(shape.group) != K_STEP:
            return f"takes groups divisible by {K_STEP}, not {shape.group}"
        return shape.lacks_arch(self.arch)


def _gemv(shape: Shape, M: int, fused: bool) -> GemvImmaConfig | None:
    """Limbs that the operation before makes cost nothing; made by a kernel they must pay."""
    config = default_gemv_config(M, shape.N, shape.K, shape.group, shape.spec.bits, shape.sm_count)
    if config is None or fused or limbs_pay(M, shape.N, shape.K):
        return config
    return None if shape.spec.bits in SMALL_M.bits else config


def _small_m(shape: Shape, M: int, fused: bool) -> SmallMConfig | None:
    return default_small_m_config(M, shape.N, shape.K, shape.group, shape.spec.bits, shape.sm_count)


def _large_m(shape: Shape, M: int, fused: bool) -> LargeMConfig | None:
    return default_large_m_config(M, shape.N, shape.K, shape.group, shape.spec.bits, shape.sm_count)


def _triton(shape: Shape, M: int, fused: bool) -> TritonGemmConfig | None:
    config = default_triton_config(M, shape.N, shape.K, shape.group, shape.sm_count)
    if config is None or shape.has_tma:
        return config
    return without_tma(config)


SMALL_M = Variant(
    name="sm90_small_m",
    config=SmallMConfig,
    rows=f"up to {SMALL_M_ROWS[-1]} rows",
    arch="sm_90",
    bits=(4,),
    whole_k_steps=True,
    default=_small_m,
    adds_adapters=True,
)
LARGE_M = Variant(
    name="sm90_large_m",
    config=LargeMConfig,
    rows="many rows",
    arch="sm_90",
    whole_k_steps=True,
    default=_large_m,
)
CUBLAS = Variant(
    name="cublas",
    config=None,
    rows="what no other takes",
    default=lambda shape, M, fused: None,
)
# In order of preference; cuBLAS, after dequantizing, takes what is left.
VARIANTS: tuple[Variant, ...] = (
    Variant(
        name="sm90_gemv_imma",
        config=GemvImmaConfig,
        rows=f"up to {LIMBS_MAX_ROWS} rows",
        arch="sm_90",
        whole_k_steps=True,
        default=_gemv,
        adds_adapters=True,
    ),
    SMALL_M,
    LARGE_M,
    Variant(
        name="triton",
        config=TritonGemmConfig,
        rows=f"up to {MAX_FUSED_ROWS} rows",
        default=_triton,
    ),
    CUBLAS,
)
NAMES = tuple(variant.name for variant in VARIANTS)


def variant_of(config: WNA16Config | None) -> Variant:
    """The variant that a config belongs to."""
    return next(variant for variant in VARIANTS if variant.config is (config and type(config)))


@functools.lru_cache(maxsize=2**14)
def default_config(
    shape: Shape, M: int, *, fused: bool = False, choice: KernelChoice = ANY
) -> WNA16Config | None:
    """The config of the first variant that takes M rows; None: dequantize and cuBLAS.

    `fused`: the operation before the product makes its operand. A variant that was asked for is
    taken wherever it runs, one that was forbidden nowhere.
    """
    asked = [variant for variant in VARIANTS if variant.name == choice.only]
    for variant in asked + [each for each in VARIANTS if each.name not in choice.never]:
        if variant is CUBLAS:
            return None
        if variant.refuses(shape) is None:
            config = variant.default(shape, M, fused or variant in asked)
            if config is not None:
                return config
    return None


def usable_config(config: WNA16Config | None, shape: Shape, M: int) -> tuple[object, bool]:
    """Adapt a table's config to these rows and this GPU; also return whether it can run.

    A table does not know which triton is installed, and its SM count may be another GPU's: splits
    of K that are not all resident would wait for each other forever.
    """
    if isinstance(config, LargeMConfig):
        config = config.on(M, shape.N, shape.sm_count)
        if not config.fits(M, shape.N, shape.K):
            return config, False
    return config, variant_of(config).refuses(shape) is None
