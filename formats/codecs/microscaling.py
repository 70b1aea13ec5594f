"""MXFP8 and MXFP6: numbers that share a power of two among 32 inputs. Exact in memory.

A scale byte e means 2^(e - 127), and 255 is NaN. MXFP8's numbers are float8_e4m3fn and are kept.
MXFP6's numbers are e2m3: a sign, two bits of exponent and three of mantissa. Eight times such a
number is an integer of at most 60, which an 8-bit code holds exactly. Legend: N outputs, K inputs,
G = K / 32 groups.
"""

import torch

from formats.errors import CheckpointError, tensor_error
from formats.in_memory.fp8 import Fp8Weight
from formats.in_memory.packed import PackedWeight
from formats.scheme import MXFP8, QuantSpec

GROUP = 32
EXPONENT_BIAS = 127
NAN_EXPONENT = 255
MXFP6 = QuantSpec(bits=8, symmetric=True, group_size=GROUP)  # spec of the weight in memory
# eight times the numbers of codes 0 to 31: subnormal below code 8, then three octaves
_FP6_EIGHTHS = (*range(8), *(m << octave for octave in range(3) for m in range(8, 16)))


def powers_of_two(exponents: torch.Tensor, name: str = "weight") -> torch.Tensor:
    """Convert scale bytes to float32. Raises CheckpointError on NaN."""
    if exponents.dtype != torch.uint8:
        raise tensor_error(name, f"expected uint8 exponents, found {exponents.dtype}")
    if (exponents == NAN_EXPONENT).any():
        raise CheckpointError(name, "contains NaN", "quantize again")
    return torch.exp2(exponents.double() - EXPONENT_BIAS).float()


def exponents_of(scales: torch.Tensor, name: str = "weight") -> torch.Tensor:
    """Convert powers of two to scale bytes. Raises CheckpointError on other numbers."""
    exponents = (torch.frexp(scales.float()).exponent + EXPONENT_BIAS - 1).clamp(0, 254)
    exponents = exponents.to(torch.uint8)
    if not torch.equal(powers_of_two(exponents), scales.float()):
        raise CheckpointError(
            f"{name} scales",
            "are not powers of two, the only scales that MXFP8 stores",
            "write the scheme w8a8-fp8-block, or quantize the float model with w8a8-mxfp8",
        )
    return exponents


def decode_mxfp8(codes_NK: torch.Tensor, exponents_NG: torch.Tensor, name: str) -> Fp8Weight:
    """Decode float8_e4m3fn codes [N, K] and scale bytes [N, G]."""
    scales_NG = powers_of_two(exponents_NG, f"{name}.weight_scale")
    return Fp8Weight(codes_NK=codes_NK, scales_RC=scales_NG, spec=MXFP8)


def decode_mxfp6(bytes_NB: torch.Tensor, exponents_NG: torch.Tensor, name: str) -> PackedWeight:
    """Decode 6-bit codes [N, 3 K / 4]: four in three bytes, the first input in the lowest bits."""
    groups = exponents_NG.shape[-1] if exponents_NG.ndim == 2 else 0
    wanted = (exponents_NG.shape[0], groups * GROUP * 3 // 4)
    if bytes_NB.dtype != torch.uint8 or tuple(bytes_NB.shape) != wanted or not groups:
        raise tensor_error(
            f"{name}.weight_packed",
            f"expected uint8 {list(wanted)} with scales {list(exponents_NG.shape)},"
            f" found {bytes_NB.dtype} {list(bytes_NB.shape)}",
        )
    triples = bytes_NB.int().unflatten(1, (-1, 3))
    words = triples[..., 0] | triples[..., 1] << 8 | triples[..., 2] << 16
    codes_NK = torch.stack([words >> shift & 63 for shift in (0, 6, 12, 18)], -1).flatten(1)
    eighths = torch.tensor(_FP6_EIGHTHS, dtype=torch.int16, device=bytes_NB.device)
    signed_NK = torch.cat([eighths, -eighths])[codes_NK]
    scales_NG = powers_of_two(exponents_NG, f"{name}.weight_scale") / 8
    return PackedWeight.from_codes(signed_NK + MXFP6.symmetric_zero, scales_NG, None, MXFP6, name)
