"""The kernel variants of W4A16 and W8A16, one row each, and which of them takes M rows.

Adding a variant is a module with `run`, a config, and a row. Plain Python, no tensors.
Legend: M rows of x, N outputs, K inputs.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from formats.scheme import QuantSpec
from qkernels.choice import FIXED_ORDER, KernelChoice
from qkernels.gpu import device as gpu_device
from qkernels.gpu.config import ceil_div
from qkernels.operands.limbs import K_STEP, LIMBS_MAX_ROWS
from qkernels.wna16.layout import TILE_N, GroupedSpec, k_step
from qkernels.wna16.sm90_gemv_imma_config import (
    GemvImmaConfig,
    default_gemv_config,
    limbs_pay,
)
from qkernels.wna16.sm90_large_m_config import (
    LARGE_M_SIZES,
    LARGE_M_SPLITS,
    LargeMConfig,
    default_large_m_config,
    large_m_time,
)
from qkernels.wna16.sm90_small_m_config import (
    SMALL_M_ROWS,
    SmallMConfig,
    default_small_m_config,
    scaled_config,
)
from qkernels.wna16.triton_config import (
    MAX_FUSED_ROWS,
    TritonGemmConfig,
    default_triton_config,
    without_tma,
)

WNA16Config = TritonGemmConfig | GemvImmaConfig | SmallMConfig | LargeMConfig
ANY = KernelChoice()
# us of a tile of 256 rows for each segment after the first: its total goes through the L2
_SEGMENT_TIME = 6.0
# us of a K step more, by consumers, where the total of the segments before is kept in registers.
# o / down at 4096 rows with two consumers take 234 / 919, with 256 rows and the L2 259 / 770; qkv
# with three 300, with the L2 376
_TOTAL_TIME = {2: 0.3, 3: 0.09}
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
    grouped: bool = False  # also K steps of several groups, each with a scale and a minimum
    default: Default
    adds_adapters: bool = False  # takes a LoraTerm

    def refuses(self, shape: Shape) -> str | None:
        """Why it runs no number of rows of this weight on this GPU; None: it runs some."""
        if shape.spec.bits not in self.bits:
            return f"takes {' and '.join(map(str, self.bits))} bits, not {shape.spec.bits}"
        if isinstance(shape.spec, GroupedSpec) and not self.grouped:
            return f"takes one scale for each K step, not one for {shape.spec.group} inputs"
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
    config = default_small_m_config(
        M, shape.N, shape.K, shape.group, shape.spec.bits, shape.sm_count
    )
    if config is None or not isinstance(shape.spec, GroupedSpec):
        return config
    return replace(config, scales_weights=True)


def _large_m(shape: Shape, M: int, fused: bool) -> LargeMConfig | None:
    return default_large_m_config(M, shape.N, shape.K, shape.group, shape.spec.bits, shape.sm_count)


def _triton(shape: Shape, M: int, fused: bool) -> TritonGemmConfig | None:
    config = default_triton_config(M, shape.N, shape.K, shape.group, shape.sm_count)
    if config is None or shape.has_tma:
        return config
    return without_tma(config)


@functools.lru_cache(maxsize=2**14)
def sm90_fixed_order(
    M: int, N: int, K: int, bits: int, sm_count: int
) -> SmallMConfig | LargeMConfig:
    """The fastest config for M rows among those that divide K alike."""
    split = _fixed_split(N, K, bits, sm_count)
    if bits == 4 and SMALL_M_ROWS[-1] >= M:
        return scaled_config(M, N, K, split, sm_count)
    configs = [
        config
        for num_consumers, block_m in LARGE_M_SIZES
        if block_m >= M or block_m > 64
        for config in _fixed_large_m(num_consumers, block_m, split, M, N, bits, sm_count)
        if config.fits(M, N, K)
    ]
    return min(configs, key=lambda config: _fixed_time(config, M, N, K))


def _fixed_large_m(
    num_consumers: int, block_m: int, split: int, M: int, N: int, bits: int, sm_count: int
) -> list[LargeMConfig]:
    whole = LargeMConfig(blocks=sm_count, bits=bits, num_consumers=num_consumers, block_m=block_m)
    configs = [replace(whole, segments=split)]
    if split > 1:
        configs.append(replace(whole, split=split))
    if block_m >= 256:
        configs.append(replace(whole, segments=split, tail_split=True))
    return [config.on(M, N, sm_count) for config in configs]


def _fixed_time(config: LargeMConfig, M: int, N: int, K: int) -> float:
    time = large_m_time(config, M, N, K)
    if config.segments == 1:
        return time
    waves = ceil_div(config.tiles(M, N), config.blocks)
    if config.keeps_total:
        return time + waves * K / K_STEP * _TOTAL_TIME[config.num_consumers]
    return time + (config.segments - 1) * waves * _SEGMENT_TIME


def _fixed_split(N: int, K: int, bits: int, sm_count: int) -> int:
    """Ranges of K: as many as few rows need to fill the GPU, of what both kernels can divide."""
    tiles = ceil_div(N, TILE_N)
    # the splits of sm90_large_m.py must be resident together, one block on each SM
    most = sm_count // ceil_div(tiles, 2) if bits == 8 else 3 * sm_count // tiles
    return max(split for split in LARGE_M_SPLITS if split <= max(1, min(most, K // K_STEP)))


def triton_fixed_order(M: int, N: int, K: int, group: int) -> TritonGemmConfig:
    """The portable kernel's config: K is not divided."""
    block_m = next((rows for rows in (16, 32, 64) if rows >= M), 128)
    steps = K // k_step(group)
    return TritonGemmConfig(
        block_m=block_m,
        block_n=TILE_N,
        split=1,
        stages=min(3, max(1, steps)),
        use_tma=block_m >= 32,
        pdl=M <= 128,
    )


def _fixed_order(shape: Shape, M: int, fused: bool) -> WNA16Config:
    """Sums of one order for every M: a row's bits depend on it alone.

    On sm_90 all kernels multiply scaled weights, and K is divided into the same ranges for all M:
    over blocks (split-K) or inside of a block (segments). Elsewhere K is not divided. wgmma adds 16
    products at a time to a float32 sum, alike for every tile size (tests on a GPU check this).
    """
    is_grouped = isinstance(shape.spec, GroupedSpec)
    if shape.lacks_arch("sm_90") is None and k_step(shape.group) == K_STEP and not is_grouped:
        return sm90_fixed_order(M, shape.N, shape.K, shape.spec.bits, shape.sm_count)
    config = triton_fixed_order(M, shape.N, shape.K, shape.group)
    return config if shape.has_tma else without_tma(config)


SMALL_M = Variant(
    name="sm90_small_m",
    config=SmallMConfig,
    rows=f"up to {SMALL_M_ROWS[-1]} rows",
    arch="sm_90",
    bits=(4,),
    whole_k_steps=True,
    grouped=True,
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
    grouped=True,
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
        grouped=True,
        default=_triton,
    ),
    CUBLAS,
)
# Runs as one of the variants above; only where it was asked for.
ONE_ORDER = Variant(
    name=FIXED_ORDER,
    config=None,
    rows="all rows, each with the same bits whatever the other rows are",
    grouped=True,
    default=_fixed_order,
)
BY_NAME = {variant.name: variant for variant in (*VARIANTS, ONE_ORDER)}
NAMES = tuple(BY_NAME)


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
    asked = [variant for variant in BY_NAME.values() if variant.name == choice.only]
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
