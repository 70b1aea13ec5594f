"""Structs of sm90_few_tokens.py: constants of a launch, arguments of the kernel, work tiles.

Legend: see sm90_few_tokens.py.
"""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from qkernels.gpu.config import CompileTimeConfig, power_of_two
from qkernels.gpu.gluon_compat import aggregate, integer


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensTile(CompileTimeConfig):
    """Compile-time constants of a launch."""

    top_k: int
    glu: bool  # True: gate_up, whose outputs are gate and up; False: down
    sorted: bool  # True: columns are sorted pairs; False: tokens
    counted: bool  # True: the list starts with the number of entries; False: it is one token's ids
    # weighted outputs of down: partial sums float32 [split, k, M, N]; False: rows [P, N]
    parts: bool = False
    alpha: float = 1.0
    offset: float = 0.0
    limit: float = 0.0  # 0: none

    @property
    def slots(self) -> int:
        return power_of_two(self.top_k)


@aggregate
class WorkTile:
    """One split of one tile of an entry."""

    entry: gl.tensor  # number d of the entry
    expert: gl.tensor
    first: gl.tensor  # first of its sorted pairs
    pairs: gl.tensor
    tile: gl.tensor  # number of the tile within the expert
    split: gl.tensor
    k_begin: gl.tensor  # in K steps
    k_end: gl.tensor


@aggregate
class Experts:
    """Arguments of the kernel."""

    weight: tma.tensor_descriptor  # packed [E N/64 K/4, 32]
    x: tma.tensor_descriptor  # [M, K], [D M, K] or [P, K], boxes [BM, 64]
    scales: tma.tensor_descriptor  # [E N/64 G 64]; with 4-bit floats words of scales by row
    offsets: tma.tensor_descriptor  # [E N/64 G 64], valid if has_offsets
    bias_ptr: gl.tensor  # [E, N], valid if has_bias
    factors_ptr: gl.tensor  # float32 [E, N], valid with fp4
    ids_ptr: gl.tensor  # [M, k]; sorted: the pairs [P]
    weights_ptr: gl.tensor  # [M, k]; sorted: [P]; valid in down
    active_ptr: gl.tensor  # as in ActiveExperts
    y_ptr: gl.tensor  # gate_up: [D M, N / 2] or [P, N / 2]; down: as in TokensTile
    M: integer
    N: integer
    k_steps: integer
    tiles: integer  # tiles per expert
    most: integer  # largest possible number of entries
    CONFIG: gl.constexpr  # FewTokensConfig
    NUMERICS: gl.constexpr  # WeightNumerics
    TILE: gl.constexpr  # TokensTile

    @gluon.jit
    def num_entries(self):
        # .cg, here and below: a block may start before the kernel that wrote these values has
        # ended, and the SM's L1 may hold older values
        if self.TILE.counted:
            return gl.load(self.active_ptr, cache_modifier=".cg")
        else:
            return gl.to_tensor(self.TILE.top_k)

    @gluon.jit
    def work_tile(self, work, num_entries):
        """After the last one that there is, the last entry again."""
        SPLIT: gl.constexpr = self.CONFIG.split
        split = work % SPLIT
        entry = gl.minimum(work // SPLIT // self.tiles, num_entries - 1)
        ptr = self.active_ptr + entry
        if self.TILE.counted:
            ptr += 1
        expert = gl.load(ptr, cache_modifier=".cg")
        if self.TILE.sorted:
            first = gl.load(ptr + self.most, cache_modifier=".cg")
            pairs = gl.load(ptr + 2 * self.most, cache_modifier=".cg")
        else:
            first = entry
            pairs = entry
        return WorkTile(
            entry=entry,
            expert=expert,
            first=first,
            pairs=pairs,
            tile=work // SPLIT % self.tiles,
            split=split,
            k_begin=split * self.k_steps // SPLIT,
            k_end=(split + 1) * self.k_steps // SPLIT,
        )

    @gluon.jit
    def first_row(self, work_tile):
        """Rows of x in a tile."""
        if self.TILE.sorted:
            return work_tile.first
        elif self.TILE.glu:
            return gl.to_tensor(0)
        else:
            return work_tile.entry * self.M

    @gluon.jit
    def loaded_tile(self, work_tile, CONSUMER: gl.constexpr):
        """The stored tile of a consumer."""
        tile = work_tile.expert * self.tiles + work_tile.tile
        return tile * self.CONFIG.num_consumers + CONSUMER

    @gluon.jit
    def first_output(self, work_tile, CONSUMER: gl.constexpr):
        """Index of a consumer's 64 outputs among those of the expert."""
        return (work_tile.tile * self.CONFIG.num_consumers + CONSUMER) * 64
