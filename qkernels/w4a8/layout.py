"""The prepacked 4-bit weight of W4A8 products: codes in the order of an 8-bit tensor core fragment.

A K step has BK inputs and lies in one tile of 64 outputs. A byte holds two codes; the 16 bytes that
a thread of the tensor core needs of a row and 128 inputs are contiguous (notes/layouts.md). For
float8 inputs a code is stored as a sign and a magnitude, which become e4m3 in a few instructions.

Legend: N outputs, K inputs, G groups; BK inputs of a K step.
"""

import torch

from qkernels.gpu.config import ceil_div

TILE_N = 64  # outputs of a stored tile: the rows of operand A of one wgmma
K_STEP = 128  # inputs of a K step at most: 128 bytes of x, the widest swizzle of shared memory
MIN_K_STEP = 32  # inputs of one 8-bit product of the tensor core
ZERO = 8  # the code of 0

# Kernels multiply int8 codes as 16 times their value, and float8 ones as 2^-9 times: e4m3's
# smallest number is 2^-9, so a magnitude's bits are its own e4m3.
INT_FACTOR = 16.0
FLOAT8_FACTOR = 2.0**-9

# A word of eight codes, $2, to two words of int8: the low codes shifted left, masked, and their
# sign bits flipped.
INT8_PTX = """{
    .reg .b32 low;
    shl.b32 low, $2, 4;
    lop3.b32 $0, low, 0xF0F0F0F0, 0x80808080, 0x6A;
    lop3.b32 $1, $2, 0xF0F0F0F0, 0x80808080, 0x6A;
}"""

# As signs and magnitudes, to two words of e4m3. Of a code n, t is the sign bit: n + 0x79 t has that
# at bit 7, and one added to the magnitude of a negative number.
FLOAT8_PTX = """{
    .reg .b32 n, t, high;
    and.b32 n, $2, 0x0F0F0F0F; shr.u32 t, $2, 3; and.b32 t, t, 0x01010101;
    mad.lo.u32 $0, t, 0x79, n;
    shr.u32 high, $2, 4; and.b32 n, high, 0x0F0F0F0F;
    shr.u32 t, $2, 7; and.b32 t, t, 0x01010101;
    mad.lo.u32 $1, t, 0x79, n;
}"""


def code_factor(type: str) -> float:
    """Return how many times its value a code is in a product with inputs of this type."""
    return INT_FACTOR if type == "int" else FLOAT8_FACTOR


def k_step(group: int) -> int:
    """Return the inputs of a K step of Triton's kernel: at most K_STEP, and none of two groups."""
    return min(K_STEP, group & -group)


def padded_n(N: int) -> int:
    """Return the outputs that are stored: whole tiles."""
    return ceil_div(N, TILE_N) * TILE_N


def sign_and_magnitude(codes_NK: torch.Tensor) -> torch.Tensor:
    """Return 4-bit codes as float8 products hold them: code - 8 if that is positive or 0.

    Others are 8 plus the magnitude of code - 8, minus 1, so that -8 fits.
    """
    return torch.where(codes_NK < ZERO, 15 - codes_NK, codes_NK - ZERO)


def byte_order(codes_NK: torch.Tensor) -> torch.Tensor:
    """4-bit codes [N, K] to bytes, uint8 [N, K / 32, 4, 4], two codes each.

    Of 32 consecutive inputs, byte j of lane t holds input 4 t + j in its low and input
    16 + 4 t + j in its high four bits.
    """
    codes_NChtj = codes_NK.to(torch.uint8).unflatten(1, (-1, 2, 4, 4))
    return codes_NChtj[:, :, 0] | codes_NChtj[:, :, 1] << 4


def tiles_of_codes(codes_NK: torch.Tensor, type: str, block_k: int) -> torch.Tensor:
    """Return packed codes, uint8 [N/64, K/BK, 64, BK/2], for inputs of this type.

    A row of a K step is [4 lanes, BK/32, 4 bytes]. Outputs are padded with zeros.
    """
    if type == "float":
        codes_NK = sign_and_magnitude(codes_NK.to(torch.int16))
    bytes_NCtj = _padded(byte_order(codes_NK), 0 if type == "float" else ZERO * 17)
    tiles = bytes_NCtj.unflatten(1, (-1, block_k // 32)).unflatten(0, (-1, TILE_N))
    # [tiles, 64, steps, C, t, j] -> [tiles, steps, 64, t, C, j]
    return tiles.permute(0, 2, 1, 4, 3, 5).flatten(3).contiguous()


def tiles_of_scales(scales_NG: torch.Tensor) -> torch.Tensor:
    """Return scales [N, G] as [N/64, G, 64]. Outputs are padded with zeros."""
    return _padded(scales_NG, 0).unflatten(0, (-1, TILE_N)).transpose(1, 2).contiguous()


def _padded(rows: torch.Tensor, value: int) -> torch.Tensor:
    missing = padded_n(rows.shape[0]) - rows.shape[0]
    if not missing:
        return rows
    return torch.cat([rows, rows.new_full((missing, *rows.shape[1:]), value)])
