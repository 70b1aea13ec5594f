"""Simulate activation quantization in floating point, for searches and evaluation.

Legend: K inputs, G groups, L inputs of a group.
"""

import torch

from formats.in_memory.fp4 import FP8_LARGEST, FP8_SCALE, LARGEST, nearest_numbers
from formats.numerics.microscaled import shared_exponents
from formats.scheme import FP8_MAX, ActivationSpec

# Largest NVFP4 value before the tensor's scale: largest float8 scale times largest FP4 number
NVFP4_LARGEST = FP8_LARGEST * LARGEST


def fake_quantize_tokens(x: torch.Tensor, bits: int = 8) -> torch.Tensor:
    """Quantize each token's vector [..., K] with a symmetric scale per token, and dequantize it."""
    largest = 2 ** (bits - 1) - 1
    step = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / largest
    return ((x.float() / step).round_().clamp_(-largest, largest) * step).to(x.dtype)


def fake_quantize_groups(
    x: torch.Tensor, spec: ActivationSpec, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Quantize inputs [..., K] as a MICROSCALED scheme does, and dequantize them.

    `scale`: the calibrated tensor scale, required for NVFP4.
    """
    groups_GL = x.float().unflatten(-1, (-1, spec.group_size))
    largest_G1 = groups_GL.abs().amax(-1, keepdim=True)
    if spec.dynamic:
        steps_G1 = torch.exp2(shared_exponents(largest_G1, spec.bits).float())
    else:
        scale = scale.to(x.device)
        inner_G1 = (largest_G1 / LARGEST / scale).clamp(max=FP8_LARGEST).to(FP8_SCALE).float()
        steps_G1 = torch.where(inner_G1 == 0, 0.125, inner_G1) * scale
    numbers_GL = groups_GL / steps_G1
    if spec.bits == 4:
        rounded_GL = nearest_numbers(numbers_GL)
    else:
        rounded_GL = numbers_GL.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()
    return (rounded_GL * steps_G1).flatten(-2).to(x.dtype)
