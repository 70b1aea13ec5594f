"""Kernel variants of W4A16 and W8A16, one row each, and the choice of a variant for M rows.

To add a variant, add a module with `run`, a config, and a row here. Plain Python, without tensors.
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
from qkernels.wna16.layout import MIN_K_STEP, TILE_N, GroupedSpec, is_in_groups, k_step
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
# us per segment after the first, for a tile of 256 rows, whose total goes through the L2
_SEGMENT_TIME = 6.0
# num_consumers -> us that a K step takes longer if the total of earlier segments is in registers.
# At 4096 rows, o / down take 234 / 919 us with two consumers, 259 / 770 with 256 rows and the L2;
# qkv takes 300 with three consumers, 376 with the L2.
_TOTAL_TIME = {2: 0.3, 3: 0.09}
# (shape, M, fused) -> config; None if the variant cannot or should not take M rows
Default = Callable[["Shape", int, bool], WNA16Config | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A weight's shape, and the properties of the GPU that it is on."""

    N: int
    K: int
    spec: QuantSpec
    sm_count: int
    lacks: tuple[tuple[str, str], ...] = ()  # (architecture, why this GPU cannot run its kernels)
    has_tma: bool = True

    @classmethod
    def on(cls, device: torch.device, *, N: int, K: int, spec: QuantSpec, sm_count: int) -> "Shape":
        """Return the shape of a weight on a device."""
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
    config: type | None  # class of its configs; None: nothing to configure
    rows: str  # which rows it takes, for `explain`
    arch: str | None = None  # architecture it is written for; None: any that Triton supports
    bits: tuple[int, ...] = (4, 8)
    whole_k_steps: bool = False  # needs groups divisible by 128
    # Fewest inputs of a group in K steps of several groups, each with a scale and a minimum; 0: no
    # such steps.
    min_group: int = 0
    default: Default
    adds_adapters: bool = False  # `run` takes a LoraTerm

    def refuses(self, shape: Shape) -> str | None:
        """Return why the variant cannot run this weight on this GPU; None: it can for some M."""
        if shape.spec.bits not in self.bits:
            return f"takes {' and '.join(map(str, self.bits))} bits, not {shape.spec.bits}"
        if isinstance(shape.spec, GroupedSpec):
            if not self.min_group:
                return f"takes one scale for each K step, not one for {shape.spec.group} inputs"
            if shape.spec.group < self.min_group and is_in_groups(shape.spec):
                return f"takes a scale for {self.min_group} inputs, not for {shape.spec.group}"
        if self.whole_k_steps and k_step(shape.group) != K_STEP:
            return f"takes groups divisible by {K_STEP}, not {shape.group}"
        return shape.lacks_arch(self.arch)


def _gemv(shape: Shape, M: int, fused: bool) -> GemvImmaConfig | None:
    """Return the config if the previous operation makes limbs, or a kernel for them pays off."""
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
    """Return the fastest config for M rows among those that split K in the same way for every M."""
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
    """Return the number of ranges of K.

    It is large enough for few rows to fill the GPU, and possible for both kernels.
    """
    tiles = ceil_div(N, TILE_N)
    # the splits of sm90_large_m.py must be resident together, one block on each SM
    most = sm_count // ceil_div(tiles, 2) if bits == 8 else 3 * sm_count // tiles
    return max(split for split in LARGE_M_SPLITS if split <= max(1, min(most, K // K_STEP)))


def triton_fixed_order(M: int, N: int, K: int, group: int) -> TritonGemmConfig:
    """Return the config of the portable kernel, which does not split K."""
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
    """Return a batch-invariant config: a row's bits depend only on the row.

    On sm_90 all kernels multiply scaled weights, and K is divided into the same ranges for every M:
    over blocks (split-K) or within a block (segments). On other GPUs K is not divided. wgmma adds
    16 products at a time to a float32 sum, in the same way for every tile size (GPU tests check
    this).
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
    min_group=MIN_K_STEP,
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
    rows="row counts that no other variant takes",
    min_group=1,
    default=lambda shape, M, fused: None,
)
# In order of preference. The last one, cuBLAS after dequantizing, takes every M.
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
        min_group=1,
        default=_triton,
    ),
    CUBLAS,
)
# Runs one of the variants above with a batch-invariant config; only on request.
ONE_ORDER = Variant(
    name=FIXED_ORDER,
    config=None,
    rows="all rows, each with the same bits whatever the other rows are",
    min_group=1,
    default=_fixed_order,
)
BY_NAME = {variant.name: variant for variant in (*VARIANTS, ONE_ORDER)}
NAMES = tuple(BY_NAME)


def variant_of(config: WNA16Config | None) -> Variant:
    """Return the variant that a config belongs to."""
    return next(variant for variant in VARIANTS if variant.config is (config and type(config)))


@functools.lru_cache(maxsize=2**14)
def default_config(
    shape: Shape, M: int, *, fused: bool = False, choice: KernelChoice = ANY
) -> WNA16Config | None:
    """Return the config of the first variant that takes M rows; None: dequantize, then cuBLAS.

    `fused`: the operation before the product makes its operand. A requested variant is used
    wherever it can run; a forbidden one is never used.
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
    """Adapt a table's config to M rows and this GPU; also return True if it can run.

    The table may not match the installed version of Triton or the GPU's SM count. Splits of K that
    are not all resident would wait for each other forever.
    """
    if isinstance(config, LargeMConfig):
        config = config.on(M, shape.N, shape.sm_count)
        if not config.fits(M, shape.N, shape.K):
            return config, False
    return config, variant_of(config).refuses(shape) is None
