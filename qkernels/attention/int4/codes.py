"""4-bit codes of keys and values in plain torch: rotation of keys, rounding, packing.

Legend: T tokens, J KV heads, D head dim.

A row is the D numbers of one head of one token. A group shares one scale and one zero: it is half a
row of a key, or a whole row of a value. x' is the number that a code represents:

    scale = (max x - min x) / 15, at least 2^-24        float16
    zero  = min x + 8 scale                             float16
    code  = round((x - zero) / scale), half to even, from -8 to 7
    x'    = zero + code scale

A slot of a KV head holds 6 float16: scale and zero of the lower half of its key, of the upper half,
and of its value.

Byte i of a row holds two codes, each plus 8: channel i in the low nibble, channel i + D/2 in the
high nibble:

    codes      -8 -7 .. 7 of channels 0 .. 15, D = 32; 0 of channels 16 .. 31
    bytes      80 81 82 83 84 85 86 87 88 89 8a 8b 8c 8d 8e 8f

Keys are rotated before they are rounded: multiplied by the Hadamard matrix of size D (entries 1 and
-1) over the root of D. The matrix is orthogonal and its own inverse, so a rotated query times a
rotated key is the query times the key.
"""

import torch

KEY_GROUPS = 2  # of a key: the halves of its channels
LEVELS = 15  # steps between the smallest and the largest number of a group
MIN_SCALE = 2.0**-24  # the smallest float16 above 0
LARGEST_HALF = 65504.0


def rotate_heads(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., D] times the Hadamard matrix of D; sums in float32, rounded to x's dtype."""
    return _rotated(x).to(x.dtype)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """float32, each sum of two numbers in the order of the kernel: pairs, pairs of pairs, .."""
    D, y = x.shape[-1], x.float()
    apart = 1
    while apart < D:
        first, second = y.unflatten(-1, (-1, 2, apart)).unbind(-2)
        y = torch.stack([first + second, first - second], -2).flatten(-3)
        apart *= 2
    return y * D**-0.5


def encode_rows(x_TJD: torch.Tensor, is_key: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed codes, uint8 [T, J, D / 2], and scales and zeros, float16 [T, J, 4 or 2].

    A group that holds a NaN or an infinity has a NaN as zero, so all of its numbers are NaN.
    """
    groups = KEY_GROUPS if is_key else 1
    x = (_rotated(x_TJD) if is_key else x_TJD.float()).unflatten(-1, (groups, -1))
    lowest, highest = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    finite = x.isfinite().all(-1, keepdim=True)
    scale = ((highest - lowest) / LEVELS).clamp(MIN_SCALE, LARGEST_HALF)
    scale = torch.where(finite, scale, 1.0).half().float()
    zero = (lowest + 8 * scale).clamp(-LARGEST_HALF, LARGEST_HALF).half().float()
    codes = ((x - zero) / scale).round().clamp(-8, 7).nan_to_num().flatten(-2)
    zero = torch.where(finite, zero, torch.nan)
    return pack(codes), torch.cat([scale, zero], -1).half().flatten(-2)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Return bytes [..., D / 2] of codes [..., D] from -8 to 7."""
    low, high = (codes.to(torch.int16) + 8).to(torch.uint8).chunk(2, -1)
    return low | (high << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Return float32 codes [..., D] from -8 to 7 of bytes [..., D / 2]."""
    return torch.cat([packed & 15, packed >> 4], -1).float() - 8


def decode_rows(packed: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers [..., D] of codes, scales and zeros; keys stay rotated."""
    scales, zeros = pairs.float().unflatten(-1, (-1, 2)).split(1, -1)
    codes = unpack(packed).unflatten(-1, (scales.shape[-2], -1))
    return (codes * scales + zeros).flatten(-2)
