"""Structs that the warps of sm90_large_m.py share: arguments, shared memory, work tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from qkernels.gpu.gluon_compat import aggregate, integer

GROUP_N = gl.constexpr(8)  # output tiles that run at the same time, to share rows of x in the L2


@aggregate
class WorkTile:
    """A tile, one of its two halves, or one split of its K steps."""

    tile: gl.tensor
    split: integer
    tile_n: gl.tensor
    m: gl.tensor  # first row
    k_begin: integer  # in K steps
    k_end: gl.tensor


@aggregate
class Gemm:
    """Arguments of the kernel."""

    x: tma.tensor_descriptor  # [M, K], boxes [block_m, 64]
    half_x: tma.tensor_descriptor  # [M, K], boxes [block_m / 2, 64]
    weight: tma.tensor_descriptor  # packed [N/64 K/128 8 BITS, 32]
    scales_ptr: gl.tensor  # [N/64, G, 64]
    offsets_ptr: gl.tensor  # [N/64, G, 64], valid if has_offsets
    bias_ptr: gl.tensor  # [N], valid if has_bias
    y: tma.tensor_descriptor  # [M, N], boxes [store_rows, 64]
    partials_ptr: gl.tensor  # one slot per consumer of each tile; used if split > 1
    counters_ptr: gl.tensor  # zeros, one per consumer of each tile; used if split > 1
    N: integer
    tiles_n: gl.tensor
    tiles_m: gl.tensor
    k_steps: gl.tensor
    stored_tiles: gl.tensor
    whole_tiles: integer  # with tail_split: tiles before the last wave, whose tiles are halved
    CONFIG: gl.constexpr  # LargeMConfig
    NUMERICS: gl.constexpr  # WeightNumerics

    @gluon.jit
    def num_work_tiles(self):
        """(those that are not halves, all)."""
        if self.CONFIG.tail_split:
            return self.whole_tiles, 2 * self.tiles_n * self.tiles_m - self.whole_tiles
        else:
            work_tiles = self.tiles_n * self.tiles_m * self.CONFIG.split
            return work_tiles, work_tiles

    @gluon.jit
    def work_tile(self, work, HALF: gl.constexpr):
        SPLIT: gl.constexpr = self.CONFIG.split
        BM: gl.constexpr = self.CONFIG.block_m
        if HALF:
            tile = self.whole_tiles + (work - self.whole_tiles) // 2
            tile_n, tile_m = self.tile_coordinates(tile)
            return WorkTile(
                tile=tile,
                split=0,
                tile_n=tile_n,
                m=tile_m * BM + (work - self.whole_tiles) % 2 * (BM // 2),
                k_begin=0,
                k_end=self.k_steps,
            )
        else:
            tile = work // SPLIT
            split = work % SPLIT
            tile_n, tile_m = self.tile_coordinates(tile)
            return WorkTile(
                tile=tile,
                split=split,
                tile_n=tile_n,
                m=tile_m * BM,
                k_begin=split * self.k_steps // SPLIT,
                k_end=(split + 1) * self.k_steps // SPLIT,
            )

    @gluon.jit
    def tile_coordinates(self, tile):
        """(tile of N, of M). Blocks that run together share weights and rows of x in the L2."""
        group = tile // (GROUP_N * self.tiles_m)
        height = gl.minimum(self.tiles_n - group * GROUP_N, GROUP_N)
        inside = tile % (GROUP_N * self.tiles_m)
        return group * GROUP_N + inside % height, inside // height

    @gluon.jit
    def stored_tile(self, tile_n, CONSUMER: gl.constexpr):
        """A consumer's; after the last stored tile the last again, whose results are not stored."""
        return gl.minimum(tile_n * self.CONFIG.num_consumers + CONSUMER, self.stored_tiles - 1)


@aggregate
class Stages:
    """Shared memory of the pipeline. Packed weights have one slot per K step, not per stage."""

    x: gl.shared_memory_descriptor  # [stages * 2 / stages_per_step, block_m, 64]
    weight: gl.shared_memory_descriptor  # [weight_slots * num_consumers, 8 BITS, 32]
