"""Group scales that are whole multiples of one number per row, the unit.

    scale[n, g] = multiple[n, g] * unit[n]

Multiples are from -15 to 15. With symmetric 4-bit codes, (code - 8) * multiple is an integer from
-120 to 120. So a weight in groups is an int8 weight with one scale per row. Products with int8
inputs are summed as integers to the end, where scales of groups need a float32 total (Lin et al.,
"QServe: W4A8KV4 Quantization and System Co-design for Efficient LLM Serving", 2024: progressive
group quantization).

A multiple has 4 bits. A unit has so few significant bits that every product is exact in the dtype
of scales: 7 in float16, 4 in bfloat16. Files state nothing of this: the scales are ordinary ones,
and `find_multiples` compares them exactly.

Legend: N rows, G groups.
"""

import math

import torch

MOST = 15  # largest multiple
MULTIPLE_BITS = 4


def find_multiples(scales_NG: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return (units_N1, multiples_NG), or None if a row has no unit.

    Units are float32 and the largest ones possible, multiples int8. Their product is exactly the
    stored scale. A row of zeros has the unit 0.
    """
    scales_NG = scales_NG.double()
    if not scales_NG.numel() or not torch.isfinite(scales_NG).all():
        return None
    max_N1 = scales_NG.abs().amax(1, keepdim=True)
    divisor_N1 = torch.where(max_N1 == 0, 1.0, max_N1)
    units_N1 = torch.full_like(max_N1, -1.0)
    multiples_NG = torch.zeros_like(scales_NG)
    for largest in range(1, MOST + 1):
        # products with a number of 4 bits are exact in float64 for scales of up to 49 bits
        found_NG = (scales_NG * largest / divisor_N1).round()
        unit_N1 = (max_N1 / largest).float().double()
        is_exact_N1 = (found_NG * unit_N1 == scales_NG).all(1, keepdim=True) & (units_N1 < 0)
        units_N1 = torch.where(is_exact_N1, unit_N1, units_N1)
        multiples_NG = torch.where(is_exact_N1, found_NG, multiples_NG)
    if (units_N1 < 0).any():
        return None
    return units_N1.float(), multiples_NG.to(torch.int8)


def units_of(scales_NG: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """Return each row's unit, float64 [N, 1]: a fifteenth of its largest scale times `factor`.

    It is rounded to so few bits that its multiples are exact in the dtype of scales.
    """
    dtype = scales_NG.dtype
    significant = 1 - int(math.log2(torch.finfo(dtype).eps)) - MULTIPLE_BITS
    wanted_N1 = scales_NG.double().abs().amax(1, keepdim=True) * (factor / MOST)
    _, exponent_N1 = torch.frexp(wanted_N1)
    step_N1 = torch.ldexp(torch.ones_like(wanted_N1), exponent_N1 - significant)
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # subnormal
    step_N1 = step_N1.clamp(min=smallest)
    return (wanted_N1 / step_N1).round().clamp(min=1) * step_N1


def nearest_multiples(scales_NG: torch.Tensor, units_N1: torch.Tensor) -> torch.Tensor:
    """Return the nearest scales of the same sign and dtype that are 1 to 15 times the unit."""
    multiples_NG = (scales_NG.double().abs() / units_N1).round().clamp(1, MOST)
    return (multiples_NG * units_N1).copysign(scales_NG.double()).to(scales_NG.dtype)
