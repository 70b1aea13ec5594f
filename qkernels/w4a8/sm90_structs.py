"""Named structs that the warps of w4a8/sm90.py share: arguments, numerics, shared memory."""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from qkernels.gpu.gluon_compat import aggregate, integer
from qkernels.w8a8.sm90_structs import WorkTile


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """How sums of products become results; a constexpr of the kernel."""

    factor: float  # factor by which codes exceed their values in the product
    groups: int = 1  # groups per K step; each has its own scale and sum
    steps_per_group: int = 1  # K steps that share a scale; 1 if a K step has several groups
    # scales of groups multiply the groups' sums; False: one scale per output multiplies the total
    in_groups: bool = True
    # without in_groups: each group of a row has an integer that multiplies its codes
    in_multiples: bool = False

    @property
    def in_boxes(self) -> bool:
        """True if stages hold a number for each output and group: a scale or a multiple."""
        return self.in_groups or self.in_multiples


@aggregate
class Gemm:
    """Arguments of the kernel. Pointers are valid if their flag is set."""

    weight: tma.tensor_descriptor  # packed words [N/64 K/128 32, 32]
    scales: tma.tensor_descriptor  # [N/64 G 64], boxes of a K step's groups; in_boxes
    x: tma.tensor_descriptor  # codes [M, K]
    y: tma.tensor_descriptor  # [M, N]
    input_scales_ptr: gl.tensor  # [M]
    scales_ptr: gl.tensor  # [N], already divided by the factor of codes; OUTPUT_SCALES
    bias_ptr: gl.tensor  # [N]; HAS_BIAS
    partials_ptr: gl.tensor  # one slot per split of each tile; split > 1
    counters_ptr: gl.tensor  # zeros, one per consumer of each tile; split > 1
    M: gl.tensor
    N: integer
    tiles_a: gl.tensor
    tiles_b: gl.tensor
    k_steps: gl.tensor
    CONFIG: gl.constexpr  # W4A8Sm90Config
    NUMERICS: gl.constexpr  # Numerics
    HAS_BIAS: gl.constexpr
    OUTPUT_SCALES: gl.constexpr  # one scale per output, which the epilogue applies
    # option of w8a8's epilogue that these products do not use
    BLOCKS: gl.constexpr

    @gluon.jit
    def num_work_tiles(self):
        return self.tiles_a * self.tiles_b * self.CONFIG.split

    @gluon.jit
    def work_tile(self, work):
        """Blocks that run together share rows of A and of B, so that both stay in the L2."""
        SPLIT: gl.constexpr = self.CONFIG.split
        GROUP_A: gl.constexpr = self.CONFIG.group_a
        tile, split = work // SPLIT, work % SPLIT
        group = tile // (GROUP_A * self.tiles_b)
        height = gl.minimum(self.tiles_a - group * GROUP_A, GROUP_A)
        inside = tile % (GROUP_A * self.tiles_b)
        return WorkTile(
            tile_a=group * GROUP_A + inside % height,
            tile_b=inside // height,
            k_begin=split * self.k_steps // SPLIT,
            k_end=(split + 1) * self.k_steps // SPLIT,
        )

    @gluon.jit
    def stored_tile(self, tile_a, CONSUMER: gl.constexpr):
        """A consumer's 64 outputs; beyond the last ones these again, whose sums are not stored."""
        return gl.minimum(tile_a * self.CONFIG.num_consumers + CONSUMER, (self.N + 63) // 64 - 1)


@aggregate
class Stages:
    """Shared memory of the pipeline. A stage has one slot per consumer."""

    weight: gl.shared_memory_descriptor  # [slots, 32, 32]: 64 outputs, 16 words each
    scales: gl.shared_memory_descriptor  # [slots, 64 groups]; in_boxes
    x: gl.shared_memory_descriptor  # [stages, block_b, 128]
