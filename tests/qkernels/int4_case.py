"""Numbers in 4-bit KV pages, in float64, by the definition of their bits alone."""

import torch


def numbers_of(packed: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """float64 numbers [..., D] of bytes [..., D / 2] and scales and zeros [..., 2 G], as stored."""
    packed, pairs = packed.cpu().long(), pairs.cpu().double()
    half = packed.shape[-1]
    found = torch.empty(*packed.shape[:-1], 2 * half, dtype=torch.float64)
    groups = pairs.shape[-1] // 2
    for channel in range(2 * half):
        nibble = packed[..., channel % half] // (1 if channel < half else 16) % 16
        group = channel * groups // (2 * half)
        found[..., channel] = (nibble - 8) * pairs[..., 2 * group] + pairs[..., 2 * group + 1]
    return found


def hadamard(D: int) -> torch.Tensor:
    """The orthogonal matrix that keys are rotated by, float64 [D, D]."""
    signs = [[(-1) ** (row & column).bit_count() for column in range(D)] for row in range(D)]
    return torch.tensor(signs, dtype=torch.float64) * D**-0.5
