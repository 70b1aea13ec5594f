"""Named structs that the warps of w8a8/sm90.py share: arguments, shared memory, work tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from qkernels.gpu.gluon_compat import aggregate, integer


@aggregate
class WorkTile:
    """One split of one output tile."""

    tile_a: gl.tensor
    tile_b: gl.tensor
    k_begin: gl.tensor  # in K steps
    k_end: gl.tensor


@aggregate
class Gemm:
    """Arguments of the kernel. Pointers are valid if their flag is set."""

    weight: tma.tensor_descriptor  # codes [N/64 K/128 64, 128], boxes [weight_box_rows, 128]
    x: tma.tensor_descriptor  # codes [M, K]
    y: tma.tensor_descriptor  # [M, N]; with idle rows [N / stored_rows, M, stored_rows]
    input_scales_ptr: gl.tensor  # [M]; BLOCKS: [M, K / 128]
    scales_ptr: gl.tensor  # [N]; BLOCKS: [N / 128, K / 128]
    bias_ptr: gl.tensor  # [N]; HAS_BIAS
    partials_ptr: gl.tensor  # one slot per split of each tile; split > 1
    counters_ptr: gl.tensor  # zeros, one per consumer of each tile; split > 1
    M: gl.tensor
    N: integer
    tiles_a: gl.tensor
    tiles_b: gl.tensor
    k_steps: gl.tensor
    CONFIG: gl.constexpr  # W8A8Sm90Config
    HAS_BIAS: gl.constexpr
    BLOCKS: gl.constexpr  # one scale per 128 inputs of x, and per 128 x 128 of the weight
    OUTPUT_SCALES: gl.constexpr  # one scale per output, which the epilogue applies

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


@aggregate
class Stages:
    """Shared memory of the pipeline."""

    a: gl.shared_memory_descriptor  # [stages * num_consumers, consumer_rows, BLOCK_K]
    b: gl.shared_memory_descriptor  # [stages, block_b, BLOCK_K]


@aggregate
class EpilogueBuffers:
    """Shared memory of the epilogue."""

    y: gl.shared_memory_descriptor  # [num_consumers * store_stages, a store tile]
    # float32 scales and biases of a tile's columns, for each consumer
    column_vectors: gl.shared_memory_descriptor


@aggregate
class EpilogueVectors:
    """Scales and biases of a consumer's result, loaded while the product runs.

    Vectors along columns are one tensor per store tile, in the registers that use them. With
    CONFIG.column_vectors_in_shared, they are one tensor for all columns, in few registers.
    """

    row_scales: gl.tensor | gl.constexpr  # None: already applied to the sums
    row_bias: gl.tensor | gl.constexpr  # None: along columns, or no bias
    column_scales: gl.tuple
    column_biases: gl.tuple
