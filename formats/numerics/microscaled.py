"""Shared powers of two of the microscaling formats MXFP4 and MXFP8."""

import torch

# bits of a number -> exponent of the largest number (6 or 448)
_OFFSETS = {4: 2, 8: 8}


def shared_exponents(largest: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the exponents of scales for groups with these largest magnitudes.

    A group fills the range of its numbers. From 1.75 times a power of two on, the next power is
    used, as in the compressed-tensors library. Groups of zeros have the smallest exponent.
    """
    mantissa, exponent = torch.frexp(largest.float())  # largest = mantissa * 2^exponent, below 1
    exponent = exponent - 1 + (mantissa >= 0.875).int() - _OFFSETS[bits]
    return torch.where(largest == 0, -127, exponent).clamp(-127, 127)
