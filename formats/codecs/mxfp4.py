"""Reader of MXFP4 as gpt-oss stores its experts, converted exactly to 8-bit codes.

A block of 32 inputs has one scale byte s, 2^(s - 127), and 16 bytes of two numbers each (fp4.py):
multiples of a half, at most 6. An 8-bit code in groups of 32 holds one exactly, with scale 2^(s -
128) and zero point 128. Legend: N outputs, K inputs, G = K / 32 groups.
"""

import torch

from formats.errors import CheckpointError
from formats.in_memory.fp4 import doubled
from formats.in_memory.packed import PackedWeight
from formats.numerics.bits import pack
from formats.scheme import QuantSpec

METHOD = "mxfp4"  # in quant_method
GROUP = 32
SPEC = QuantSpec(bits=8, symmetric=True, group_size=GROUP)


def decode(blocks_NGB: torch.Tensor, scales_NG: torch.Tensor, name: str = "weight") -> PackedWeight:
    """Convert uint8 blocks [N, G, 16] and scales [N, G] to the same weight in 8-bit codes."""
    N, G = scales_NG.shape
    if blocks_NGB.shape != (N, G, GROUP // 2) or blocks_NGB.dtype != torch.uint8:
        raise CheckpointError(
            name,
            f"expected uint8 blocks [{N}, {G}, {GROUP // 2}],"
            f" found {blocks_NGB.dtype} {list(blocks_NGB.shape)}",
        )
    if (scales_NG == 255).any():
        raise CheckpointError(f"{name} scales", "contain NaN", "quantize again")
    codes_NK = doubled(blocks_NGB.flatten(1)).to(torch.int16) + SPEC.symmetric_zero
    # bfloat16 has every power of two that the byte can state
    scales = torch.pow(2.0, scales_NG.double() - 128).to(torch.bfloat16)
    return PackedWeight(
        words_NW=pack(codes_NK.to(torch.uint8), SPEC.bits),
        scales_NG=scales,
        zeros_NG=torch.full((N, G), SPEC.symmetric_zero, dtype=torch.uint8, device=scales.device),
        spec=SPEC,
        in_features=G * GROUP,
    )
