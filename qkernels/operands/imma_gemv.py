"""Gluon functions of the kernels for few rows that multiply codes on the integer tensor core.

Each warp streams its own K steps of a packed weight from memory into the registers of operand A
(mma.s8): the weight's codes are in memory in the order of the lanes, 16 bytes at a time.

Legend: M rows of x, N outputs; W warps of a block, each with its own K steps of 128 inputs; BN
outputs of a block.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qkernels.gpu.registers import signed_nibbles

# The accumulator starts with the bits of the float32 number 1.5 * 2^23. A sum of 128 products is at
# most 128 * 128 * 255 < 2^22, so the result, read as float32, is 1.5 * 2^23 + sum.
MAGIC = gl.constexpr(0x4B400000)
MAGIC_FLOAT = gl.constexpr(12582912.0)


def sums_layout(W: int) -> gl.NVMMADistributedLayout:
    """Return the layout of the sums [W, BN, 8 columns]; lane = 4 g + t."""
    return gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[W, 1, 1], instr_shape=[1, 16, 8]
    )


def streamed_layout(W: int, size: int, row_bytes: int = 64) -> gl.DistributedLinearLayout:
    """Return the layout of bytes [W, size] in memory, 16 bytes of a lane together.

    The lanes t of a row are next to each other. A row of more than 64 bytes takes several loads.
    """
    lanes = [16, 32, row_bytes, 2 * row_bytes, 4 * row_bytes]
    loads = [1 << i for i in range(6, size.bit_length() - 1) if 1 << i not in lanes]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], *([0, load] for load in loads)],
        lane_bases=[[0, lane] for lane in lanes],
        warp_bases=[[1 << i, 0] for i in range(W.bit_length() - 1)],
        block_bases=[],
        shape=[W, size],
    )


@gluon.jit
def packed_pointers(
    packed_ptr,
    block,
    k_steps,
    BN: gl.constexpr,
    STORED_ROWS: gl.constexpr,
    ROW_BYTES: gl.constexpr,
    PACKED: gl.constexpr,
):
    """Return pointers [1, BN ROW_BYTES] to a block's codes of the first K step.

    A stored tile has STORED_ROWS outputs, of which the block has BN; a row of a K step has
    ROW_BYTES.
    """
    stored_tile = block // (STORED_ROWS // BN)
    inside = block % (STORED_ROWS // BN)  # which BN rows of the stored tile
    byte = gl.arange(0, ROW_BYTES * BN, layout=gl.SliceLayout(0, PACKED))
    pointers = packed_ptr + stored_tile.to(gl.int64) * k_steps * (ROW_BYTES * STORED_ROWS)
    pointers = pointers + inside * (ROW_BYTES * BN)
    return pointers + byte[None, :]


@gluon.jit
def load_codes(pointers):
    """Load codes, which are read once: the L2 should keep data that every K step reads."""
    return gl.load(pointers, eviction_policy="evict_first")


@gluon.jit
def int8_values(codes, BITS: gl.constexpr):
    """Convert bytes of codes [W, BN row_bytes] to int8 [W, BN, 128], within each thread.

    4 bits: the values are 16 (q - 8). Value 32 j + 16 h + 4 t + b is half h of byte b of word j of
    lane t. 8 bits: the values are q - 128. Value 64 i + 16 w + 4 t + b is byte b of word w of lane
    t in load i.
    """
    W: gl.constexpr = codes.shape[0]
    BN: gl.constexpr = codes.shape[1] // (16 * BITS)
    if BITS == 8:
        signed = gl.inline_asm_elementwise(
            "xor.b32 $0, $1, 0x80808080;", "=r,r", [codes], dtype=gl.int8, is_pure=True, pack=4
        )
        # [W, row, i, t, w, b]
        values = signed.reshape([W, BN, 2, 4, 4, 4]).permute([0, 1, 2, 4, 3, 5])
    else:
        low, high = signed_nibbles(codes)
        # [W, row, t, j, b, h]
        values = gl.join(low, high).reshape([W, BN, 4, 4, 4, 2]).permute([0, 1, 3, 5, 2, 4])
    return values.reshape([W, BN, 128])


@gluon.jit
def operand_a(values, SUMS: gl.constexpr):
    """Convert int8 [W, BN, inputs] to operand A, within each thread."""
    return gl.convert_layout(values, gl.DotOperandLayout(0, SUMS, 4), assert_trivial=True)


@gluon.jit
def operand_b(values, SUMS: gl.constexpr):
    """Convert int8 [W, inputs, 8 columns] to operand B, within each thread."""
    return gl.convert_layout(values, gl.DotOperandLayout(1, SUMS, 4), assert_trivial=True)


@gluon.jit
def store_sums(sums, y_ptr, bias_ptr, first_n, first_m, M, N):
    """Store sums [BN, rows of x] plus the bias to y [M, N]."""
    LAYOUT: gl.constexpr = sums.type.layout
    n = first_n + gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    m = first_m + gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    if bias_ptr is not None:
        sums += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
    mask = (m[None, :] < M) & (n[:, None] < N)
    gl.store(y_ptr + m[None, :] * N + n[:, None], sums.to(y_ptr.dtype.element_ty), mask=mask)
