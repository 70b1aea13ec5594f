"""Device functions that add scale * B h of each row's adapter inside a product on sm_90, in Gluon.

A tile of 64 outputs initializes its accumulators with the term: most of the term's loads complete
while the first weights are in flight. With few rows, the term is added after the sums, where loads
of other blocks hide it. h is rounded to B's dtype, as in lora_expand_; everything else is float32.
Legend: see weights.py; P partial sums of h, BM rows of a tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from qkernels.gpu.gluon_compat import aggregate, integer
from qkernels.lora.config import PARTS_LEFT, RANK_BLOCK

BLOCK = gl.constexpr(RANK_BLOCK)  # ranks that one product multiplies
PREFETCHED_ROWS = gl.constexpr(16)
MAX_PARTS = gl.constexpr(PARTS_LEFT)

pointer = gl.tensor | gl.constexpr  # without a term, a constexpr None


@aggregate
class LoraTermArguments:
    """Fields of term.py's TermArguments, and the number of partial sums of h."""

    h_ptr: pointer
    slots_ptr: pointer
    b_ptr: pointer
    ranks_ptr: pointer
    scales_ptr: pointer
    S: integer
    R: integer
    b_slot_stride: integer
    b_rank_stride: integer
    ranks_stride: integer
    scales_stride: integer
    first_end: integer
    second_end: integer
    third_end: integer
    PARTS: gl.constexpr

    @gluon.jit
    def slice_of(self, n):
        """Return the index of the linear, among those side by side, that has output n."""
        s = (n >= self.first_end).to(gl.int32) + (n >= self.second_end).to(gl.int32)
        return s + (n >= self.third_end).to(gl.int32)

    @gluon.jit
    def slots(self, m, M):
        return gl.load(self.slots_ptr + m, mask=m < M, other=-1)

    @gluon.jit
    def ranks(self, slots, s):
        """Load the slots' ranks in linear s; 0 for slot -1."""
        return gl.load(self.ranks_ptr + slots * self.ranks_stride + s, mask=slots >= 0, other=0)

    @gluon.jit
    def scales(self, slots, s):
        return gl.load(self.scales_ptr + slots * self.scales_stride + s, mask=slots >= 0, other=0.0)

    @gluon.jit
    def b_block(self, slots, first):
        """Return pointers to rank `first` of the slots' matrices B."""
        slot = slots.to(gl.int64) * self.b_slot_stride
        return self.b_ptr + (slot + gl.to_tensor(first).to(gl.int64) * self.b_rank_stride)

    @gluon.jit
    def h(self, m, j, s, mask, M):
        """Add all parts of h, in order."""
        ptrs = self.h_ptr + (m * self.S + s) * self.R + j
        total = gl.load(ptrs, mask=mask, other=0.0)
        for part in gl.static_range(1, self.PARTS):
            total += gl.load(ptrs + part * M * self.S * self.R, mask=mask, other=0.0)
        return total


@gluon.jit
def lora_term(arguments, PARTS: gl.constexpr):
    """Convert a kernel's TermArguments to a struct with methods."""
    return LoraTermArguments(
        h_ptr=arguments.h_ptr,
        slots_ptr=arguments.slots_ptr,
        b_ptr=arguments.b_ptr,
        ranks_ptr=arguments.ranks_ptr,
        scales_ptr=arguments.scales_ptr,
        S=arguments.S,
        R=arguments.R,
        b_slot_stride=arguments.b_slot_stride,
        b_rank_stride=arguments.b_rank_stride,
        ranks_stride=arguments.ranks_stride,
        scales_stride=arguments.scales_stride,
        first_end=arguments.first_end,
        second_end=arguments.second_end,
        third_end=arguments.third_end,
        PARTS=PARTS,
    )


@gluon.jit
def prefetch_term(term, tile, M, N, split, SPLIT: gl.constexpr):
    """Prefetch B of the first rows' adapters into the L2, with 4 warps. No kernel writes B."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [2, BLOCK], [4, 1], [1, 0])
    m = gl.arange(0, PREFETCHED_ROWS, gl.SliceLayout(1, LAYOUT))
    j = gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))
    first_n = first_output(tile, N)
    slots = term.slots(m, M)
    ranks = term.ranks(slots, term.slice_of(first_n))
    block = term.b_block(gl.maximum(slots, 0), 0)
    ranks = gl.where(slots % SPLIT == split, ranks, 0)
    j = gl.where(j[None, :] < ranks[:, None], j[None, :], 0)
    # 64 outputs of one rank are 128 bytes
    _prefetch(block[:, None] + j * term.b_rank_stride + first_n)


@gluon.jit
def _prefetch(ptrs):
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0",
        "=r,l,~{memory}",
        [ptrs.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def term_of_tile(
    term, tile, M, N, zero, split, SPLIT: gl.constexpr, BM: gl.constexpr, SUMS: gl.constexpr
):
    """Return the term of a tile's 64 outputs, float32 [64, BM], in the layout SUMS.

    Every adapter's B is multiplied by every row's h, and each row selects the product of its own
    adapter. So an inf or NaN of one adapter does not reach rows of another. Split i of K takes the
    adapters whose slot modulo SPLIT is i.
    """
    # a thread has the same elements as in SUMS
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    B: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    H: gl.constexpr = gl.BlockedLayout([2, 1], [8, 4], [1, 4], [0, 1])
    # each warp has one row per lane
    ROWS: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))
    DTYPE: gl.constexpr = term.b_ptr.dtype.element_ty
    first_n = first_output(tile, N)
    s = term.slice_of(first_n)
    slots = term.slots(zero + gl.arange(0, BM, ROWS), M)
    ranks = gl.where(slots % SPLIT == split, term.ranks(slots, s), 0)
    slots_of_columns = term.slots(zero + gl.arange(0, BM, gl.SliceLayout(0, PRODUCT)), M)[None, :]
    h_m = zero + gl.arange(0, BM, gl.SliceLayout(0, H))
    h_j = gl.arange(0, BLOCK, gl.SliceLayout(1, H))[:, None]
    h_ranks = term.ranks(term.slots(h_m, M), s)
    total = gl.zeros([64, BM], gl.float32, PRODUCT)
    for first in range(0, gl.max(ranks, 0), BLOCK):
        left = gl.where(ranks > first, slots, -1)
        slot = gl.max(left, 0)
        b = _b_of_tile(term, slot, s, first, first_n, B)
        h = term.h(h_m[None, :], first + h_j, s, (h_ranks > first)[None, :], M)
        h = gl.convert_layout(h.to(DTYPE), gl.DotOperandLayout(1, PRODUCT, 2))
        while slot >= 0:
            left = gl.where(left == slot, -1, left)
            following = gl.max(left, 0)
            next_b = _b_of_tile(term, following, s, first, first_n, B)
            scale = term.scales(slot, s)
            b = gl.convert_layout(b, gl.DotOperandLayout(0, PRODUCT, 2))
            product = mma_v2(b, h, gl.zeros([64, BM], gl.float32, PRODUCT))
            total = gl.where(slots_of_columns == slot, total + scale * product, total)
            slot = following
            b = next_b
    return gl.convert_layout(total, SUMS, assert_trivial=True)


@gluon.jit
def first_output(tile, N):
    """Return the first output of a tile of 64. Tiles after the last repeat the last tile."""
    return gl.minimum(tile, N // 64 - 1) * 64


@gluon.jit
def _b_of_tile(term, slot, s, first, first_n, LAYOUT: gl.constexpr):
    """Load 16 ranks from `first` on of a slot's B, [64, 16]; zeros for slot -1."""
    n = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    j = gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))[None, :]
    ptrs = term.b_block(slot, first) + first_n + j * term.b_rank_stride + n
    return gl.load(ptrs, mask=first + j < term.ranks(slot, s), other=0.0)


@gluon.jit
def prefetch_few_rows(term, first_n, M, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Prefetch B of a block's outputs into the L2. No kernel writes B."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    i = gl.arange(0, ROWS * BLOCK, LAYOUT)
    slots = term.slots(i // BLOCK, M)
    ranks = term.ranks(slots, term.slice_of(first_n))
    j = gl.where(i % BLOCK < ranks, i % BLOCK, 0)
    _prefetch(term.b_block(gl.maximum(slots, 0), 0) + (j * term.b_rank_stride + first_n))


@gluon.jit
def add_few_rows(term, totals, first_n, M, SUMS: gl.constexpr):
    """Add the term to sums [W, BN, 8] for each tile of two rows.

    Each warp and each of a row's four columns takes different ranks. They are added later.
    """
    W: gl.constexpr = totals[0].shape[0]
    BN: gl.constexpr = totals[0].shape[1]
    DTYPE: gl.constexpr = term.b_ptr.dtype.element_ty
    COLS: gl.constexpr = gl.SliceLayout(1, SUMS)  # [W, 8]
    column = gl.arange(0, 8, gl.SliceLayout(0, COLS))[None, :]
    own_j = gl.arange(0, W, gl.SliceLayout(1, COLS))[:, None] * 4 + column % 4
    n = first_n + gl.arange(0, BN, gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))[None, :, None]
    # the lanes that share a column each load some parts of h
    part = gl.arange(0, MAX_PARTS, gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))[None, :, None]
    s = term.slice_of(first_n)
    new = ()
    for i in gl.static_range(len(totals)):
        slot0 = term.slots(2 * i, M)
        slot1 = term.slots(2 * i + 1, M)
        rank0 = term.ranks(slot0, s)
        rank1 = term.ranks(slot1, s)
        first_row = column < 4
        block = gl.where(first_row, term.b_block(slot0, 0), term.b_block(slot1, 0))
        ranks = gl.where(first_row, rank0, rank1)
        scales = gl.where(first_row, term.scales(slot0, s), term.scales(slot1, s))
        m = 2 * i + column // 4
        total = totals[i]
        for first in range(0, gl.maximum(rank0, rank1), 4 * W):
            j = first + own_j
            ptrs = block + gl.to_tensor(first).to(gl.int64) * term.b_rank_stride
            ptrs = ptrs[:, None, :] + ((own_j * term.b_rank_stride)[:, None, :] + n)
            b = gl.load(ptrs, mask=(j < ranks)[:, None, :], other=0.0)  # [W, BN, 8]
            h = _h_of_few_rows(term, m, j, s, ranks, scales, part, M, DTYPE)
            total += h * b.to(gl.float32)
        new += (total,)
    return new


@gluon.jit
def _h_of_few_rows(term, m, j, s, ranks, scales, part, M, DTYPE: gl.constexpr):
    """Return one number of h per column, rounded to DTYPE, times its row's scale: [W, 1, 8]."""
    offset = ((m * term.S + s) * term.R + j)[:, None, :] + part * (M * term.S * term.R)
    mask = (part < term.PARTS) & (j < ranks)[:, None, :]
    h = gl.sum(gl.load(term.h_ptr + offset, mask=mask, other=0.0), 1)
    return (h.to(DTYPE).to(gl.float32) * scales)[:, None, :]
