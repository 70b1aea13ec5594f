"""Named structs that the warps of sm90_decode.py share: arguments, shared memory, the block's tile.

Legend: see latent/ops.py; N columns of a tile, S splits of a context. A column is one query row of
one head: the heads of a row are adjacent. A step is KEYS keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from qkernels.gpu.gluon_compat import aggregate
from qkernels.gpu.pipeline import Pipeline
from qkernels.latent.sm90_decode_config import CHUNK_WIDTH, STEP_KEYS, STEP_STAGES

KEYS = gl.constexpr(STEP_KEYS)
STAGES = gl.constexpr(STEP_STAGES)
WIDTH = gl.constexpr(CHUNK_WIDTH)


@aggregate
class Latents:
    """Arguments of the kernel."""

    q_ptr: gl.tensor  # [T, H, E]
    pages: tma.tensor_descriptor  # [P, B, E], boxes of up to KEYS tokens and WIDTH numbers
    out_ptr: gl.tensor  # [T, H, L]; written if SPLIT is 1
    partials_ptr: gl.tensor | gl.constexpr  # [T, H, S, L]: each split's weighted sum of values
    sums_ptr: gl.tensor | gl.constexpr  # [2, T, H, S]: each split's largest score, sum of weights
    T: gl.tensor
    scale: gl.tensor  # above zero; makes scores base-2 logarithms, for exp2
    H: gl.constexpr
    E: gl.constexpr
    L: gl.constexpr
    N: gl.constexpr
    BLOCK_HEADS: gl.constexpr
    PAGE: gl.constexpr  # tokens of a page
    SPLIT: gl.constexpr


@aggregate
class Tile:
    """Columns and steps of one block."""

    table: gl.tensor  # pointer to the request's block table
    start: gl.tensor  # the request's first row
    count: gl.tensor  # rows of the request in this step of the engine
    before: gl.tensor  # keys before the request's first row
    end: gl.tensor  # one past the last key that a row of the block sees
    first_row: gl.tensor  # of the request
    first_head: gl.tensor
    split: gl.tensor
    first_step: gl.tensor
    last_step: gl.tensor  # one past the last

    @gluon.jit
    def row(self, latents, n):
        """Return the row, in its request, of each column."""
        return self.first_row + n // latents.BLOCK_HEADS

    @gluon.jit
    def out_row(self, latents, n):
        """Return the index in [T H] of each column, and whether the column exists."""
        row = self.row(latents, n)
        head = self.first_head + n % latents.BLOCK_HEADS
        index = (self.start + row).to(gl.int64) * latents.H + head
        return index, (row < self.count) & (head < latents.H)


@aggregate
class Entries:
    """Shared memory of the entries of all stages."""

    latent: gl.shared_memory_descriptor  # [STAGES, KEYS, L]
    rope: gl.shared_memory_descriptor  # [STAGES, KEYS, WIDTH], zero beyond E - L


@aggregate
class Weights:
    """Shared memory of one step's weights, and of a number for each column."""

    weight: gl.shared_memory_descriptor  # [N, KEYS]
    factor: gl.shared_memory_descriptor  # [N]: rescales the values; at last, the sum of weights


@aggregate
class SharedMemory:
    """Queries and pipelines. Comments name each one's producer, and its consumer in brackets."""

    q_latent: gl.shared_memory_descriptor  # [1, N, L], of the scores' warps; at last the result
    q_rope: gl.shared_memory_descriptor  # [1, N, WIDTH]
    entries: Pipeline  # Entries, from load [sum_values; the scores' warps read them before]
    weights: Pipeline  # Weights, from score [sum_values]
