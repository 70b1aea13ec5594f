"""4-bit codes of keys and values in plain torch: Hadamard rotation of keys, rounding, packing.

Legend: T tokens, J KV heads, D head dim.

A row is the D numbers of one head of one token. A group shares one scale and one zero; a group is
half a row of a key or a whole row of a value. A code represents the number x':

    scale = (max x - min x) / 15, at least 2^-24        float16
    zero  = min x + 8 scale                             float16
    code  = round((x - zero) / scale), half to even, from -8 to 7
    x'    = zero + code scale

A slot of a KV head holds 6 float16 numbers: scale and zero of the lower half of its key, of the
upper half, and of its value.

Byte i of a row holds two codes, each plus 8: channel i in the low nibble, channel i + D/2 in the
high nibble. Example:

    codes      -8 -7 .. 7 of channels 0 .. 15, D = 32; 0 of channels 16 .. 31
    bytes      80 81 82 83 84 85 86 87 88 89 8a 8b 8c 8d 8e 8f

Keys are rotated before rounding: multiplied by the Hadamard matrix of size D (entries 1 and -1)
divided by sqrt(D). This matrix is orthogonal, so the dot product of a rotated query and a rotated
key equals the one of the query and the key.
"""

import torch

KEY_GROUPS = 2  # groups of a key: the halves of its channels
LEVELS = 15  # quantization steps between the smallest and the largest number of a group
MIN_SCALE = 2.0**-24  # smallest positive float16
LARGEST_HALF = 65504.0


def rotate_heads(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., D] times the scaled Hadamard matrix; sums in float32, rounded to x's dtype."""
    return _rotated(x).to(x.dtype)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Return x times the Hadamard matrix, in the kernel's order of sums: pairs, pairs of pairs."""
    D, y = x.shape[-1], x.float()
    apart = 1
    while apart < D:
        first, second = y.unflatten(-1, (-1, 2, apart)).unbind(-2)
        y = torch.stack([first + second, first - second], -2).flatten(-3)
        apart *= 2
    return y * D**-0.5


def encode_rows(x_TJD: torch.Tensor, is_key: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed codes, uint8 [T, J, D / 2], and scales and zeros, float16 [T, J, 4 or 2].

    A group that contains NaN or infinity gets a zero of NaN, so all of its numbers decode to NaN.
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
    """Pack codes [..., D] from -8 to 7 into bytes [..., D / 2]."""
    low, high = (codes.to(torch.int16) + 8).to(torch.uint8).chunk(2, -1)
    return low | (high << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Unpack bytes [..., D / 2] to float32 codes [..., D] from -8 to 7."""
    return torch.cat([packed & 15, packed >> 4], -1).float() - 8


def decode_rows(packed: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers [..., D] from codes, scales and zeros; keys stay rotated."""
    scales, zeros = pairs.float().unflatten(-1, (-1, 2)).split(1, -1)
    codes = unpack(packed).unflatten(-1, (scales.shape[-2], -1))
    return (codes * scales + zeros).flatten(-2)
