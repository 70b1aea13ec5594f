"""Shared powers of two of the microscaling formats MXFP4 and MXFP8."""

import torch

# Bits of a number -> exponent of the power of two in its largest number, 6 or 448
_OFFSETS = {4: 2, 8: 8}


def shared_exponents(largest: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the exponents of scales for groups whose largest magnitudes are given.

    A group fills the range of its numbers; from 1.75 times a power of two on, the next one is
    taken, as the compressed-tensors library does. Groups of zeros have the smallest exponent.
    """
    mantissa, exponent = torch.frexp(largest.float())  # largest = mantissa * 2^exponent, below 1
    exponent = exponent - 1 + (mantissa >= 0.875).int() - _OFFSETS[bits]
    return torch.where(largest == 0, -127, exponent).clamp(-127, 127)
