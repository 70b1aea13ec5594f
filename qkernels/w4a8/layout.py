"""Prepacked 4-bit weight of W4A8 products: codes in the order of an 8-bit tensor core fragment.

A K step has BK inputs of one tile of 64 outputs. A byte holds two codes. The 16 bytes of a row and
128 inputs that one thread of the tensor core needs are contiguous (notes/layouts.md). For float8
inputs a code is stored as a sign and a magnitude, which take few instructions to convert to e4m3.

Legend: N outputs, K inputs, G groups; BK inputs of a K step.
"""

import torch

from qkernels.gpu.config import ceil_div

TILE_N = 64  # outputs per stored tile: the rows of operand A of one wgmma
K_STEP = 128  # maximum inputs of a K step: 128 bytes of x, shared memory's widest swizzle
MIN_K_STEP = 32  # inputs of one 8-bit product of the tensor core
ZERO = 8  # code of the value 0

# In products, an int8 code is 16 times its value, a float8 code 2^-9 times: e4m3's smallest number
# is 2^-9, so the bits of a magnitude are already an e4m3 number.
INT_FACTOR = 16.0
FLOAT8_FACTOR = 2.0**-9

# Convert a word of eight codes, $2, to two words of int8: the low codes are shifted left; then both
# are masked and their sign bits flipped.
INT8_PTX = """{
    .reg .b32 low;
    shl.b32 low, $2, 4;
    lop3.b32 $0, low, 0xF0F0F0F0, 0x80808080, 0x6A;
    lop3.b32 $1, $2, 0xF0F0F0F0, 0x80808080, 0x6A;
}"""

# Convert a word of signs and magnitudes to two words of e4m3. t is the sign bit of a code n:
# n + 0x79 t moves the sign to bit 7 and adds one to the magnitude of a negative number.
FLOAT8_PTX = """{
    .reg .b32 n, t, high;
    and.b32 n, $2, 0x0F0F0F0F; shr.u32 t, $2, 3; and.b32 t, t, 0x01010101;
    mad.lo.u32 $0, t, 0x79, n;
    shr.u32 high, $2, 4; and.b32 n, high, 0x0F0F0F0F;
    shr.u32 t, $2, 7; and.b32 t, t, 0x01010101;
    mad.lo.u32 $1, t, 0x79, n;
}"""

# The same with multiples (formats/numerics/multiples.py): int8 (code - 8) m, with m = $6. One
# multiply-add gives four bytes 128 + (code - 8) m, which are 8 to 248, so none carries into the
# next one. $10 is 128 - 8 m in each byte.
MULTIPLES_PTX = """{
    .reg .b32 low, high;
    and.b32 low, $2, 0x0F0F0F0F;
    mad.lo.s32 low, low, $6, $10;
    xor.b32 $0, low, 0x80808080;
    shr.u32 high, $2, 4; and.b32 high, high, 0x0F0F0F0F;
    mad.lo.s32 high, high, $6, $10;
    xor.b32 $1, high, 0x80808080;
}"""
BIAS = 0x80808080 - 2**32  # 128 in each byte, as int32
BIAS_STEP = -0x08080808  # change of $10 for each unit of m


def code_factor(type: str) -> float:
    """Return the factor by which codes exceed their values in products with this type of inputs."""
    return INT_FACTOR if type == "int" else FLOAT8_FACTOR


def k_step(group: int) -> int:
    """Return the inputs of a K step of the Triton kernel: at most K_STEP, within one group."""
    return min(K_STEP, group & -group)


def padded_n(N: int) -> int:
    """Return the number of stored outputs, in whole tiles."""
    return ceil_div(N, TILE_N) * TILE_N


def sign_and_magnitude(codes_NK: torch.Tensor) -> torch.Tensor:
    """Convert 4-bit codes to the form for float8 products: sign and magnitude of code - 8.

    A code that is not negative becomes code - 8. A negative one becomes 8 plus its magnitude minus
    1, so that -8 fits.
    """
    return torch.where(codes_NK < ZERO, 15 - codes_NK, codes_NK - ZERO)


def byte_order(codes_NK: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit codes [N, K] into bytes, uint8 [N, K / 32, 4, 4], two codes each.

    The layout repeats every 32 inputs. Byte j of lane t holds input 4 t + j in its low four bits
    and input 16 + 4 t + j in its high four bits.
    """
    codes_NChtj = codes_NK.to(torch.uint8).unflatten(1, (-1, 2, 4, 4))
    return codes_NChtj[:, :, 0] | codes_NChtj[:, :, 1] << 4


def tiles_of_codes(codes_NK: torch.Tensor, type: str, block_k: int) -> torch.Tensor:
    """Pack codes, uint8 [N/64, K/BK, 64, BK/2], for inputs of this type.

    A row of a K step is [4 lanes, BK/32, 4 bytes]. Padding outputs are zeros.
    """
    if type == "float":
        codes_NK = sign_and_magnitude(codes_NK.to(torch.int16))
    bytes_NCtj = _padded(byte_order(codes_NK), 0 if type == "float" else ZERO * 17)
    tiles = bytes_NCtj.unflatten(1, (-1, block_k // 32)).unflatten(0, (-1, TILE_N))
    # [tiles, 64, steps, C, t, j] -> [tiles, steps, 64, t, C, j]
    return tiles.permute(0, 2, 1, 4, 3, 5).flatten(3).contiguous()


def tiles_of_scales(scales_NG: torch.Tensor) -> torch.Tensor:
    """Rearrange scales [N, G] to [N/64, G, 64]. Padding outputs are zeros."""
    return _padded(scales_NG, 0).unflatten(0, (-1, TILE_N)).transpose(1, 2).contiguous()


def _padded(rows: torch.Tensor, value: int) -> torch.Tensor:
    missing = padded_n(rows.shape[0]) - rows.shape[0]
    if not missing:
        return rows
    return torch.cat([rows, rows.new_full((missing, *rows.shape[1:]), value)])
