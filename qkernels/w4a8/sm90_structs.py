"""Named structs that the warps of w4a8/sm90.py share: arguments, numerics, shared memory."""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from qkernels.gpu.gluon_compat import aggregate, integer
from qkernels.w8a8.sm90_structs import WorkTile


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """A constexpr of the kernel: how sums of products become results."""

    factor: float  # how many times its value a code is in the product
    groups: int = 1  # of a K step; each has a scale, and a sum of its own
    steps_per_group: int = 1  # K steps that share a scale; 1 if a K step has several groups
    # groups have scales, which multiply their sums; else an output has one, for the last sum
    in_groups: bool = True


@aggregate
class Gemm:
    """The kernel's arguments. Pointers are valid where their flag is set."""

    weight: tma.tensor_descriptor  # packed words [N/64 K/128 32, 32]
    scales: tma.tensor_descriptor  # [N/64 G 64], boxes of a K step's groups; in_groups
    x: tma.tensor_descriptor  # codes [M, K]
    y: tma.tensor_descriptor  # [M, N]
    input_scales_ptr: gl.tensor  # [M]
    scales_ptr: gl.tensor  # [N], of a code as it is multiplied; OUTPUT_SCALES
    bias_ptr: gl.tensor  # [N]; HAS_BIAS
    partials_ptr: gl.tensor  # a slot for each split of each tile; split > 1
    counters_ptr: gl.tensor  # zero, one for each consumer of each tile; split > 1
    M: gl.tensor
    N: integer
    tiles_a: gl.tensor
    tiles_b: gl.tensor
    k_steps: gl.tensor
    CONFIG: gl.constexpr  # W4A8Sm90Config
    NUMERICS: gl.constexpr  # Numerics
    HAS_BIAS: gl.constexpr
    OUTPUT_SCALES: gl.constexpr  # a scale for each output: not in the sums yet
    # what the epilogue of w8a8 can do and these products do not need
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
    """Shared memory of the pipeline. A stage has a slot for each consumer."""

    weight: gl.shared_memory_descriptor  # [slots, 32, 32]: 64 outputs, 16 words each
    scales: gl.shared_memory_descriptor  # [slots, 64 groups]; in_groups
    x: gl.shared_memory_descriptor  # [stages, block_b, 128]
