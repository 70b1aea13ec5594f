"""Tensors of NVIDIA's Model Optimizer -> weights, on the local names of one linear. Read only.

float8 and int8 weights have the names and bytes of compressed-tensors. NVFP4's scales are
multiplied by `weight_scale_2`; a byte holds the 4-bit integers of two outputs. `pre_quant_scale`
multiplies the inputs of a linear. Legend: N outputs, K inputs, G groups.
"""

from dataclasses import replace

import torch

from formats.codecs import compressed_tensors
from formats.errors import tensor_error
from formats.in_memory.fp4 import Fp4Weight, is_fp4
from formats.in_memory.packed import PackedWeight
from formats.in_memory.weights import Weight
from formats.numerics.activation import one_scale
from formats.scheme import Scheme

PRE_SCALE = "pre_quant_scale"
FIELDS = ("weight", "weight_scale", "weight_scale_2", "input_scale", PRE_SCALE)
_SIGN = 8  # sign bit of two's complement in four bits


def decode(tensors: dict[str, torch.Tensor], scheme: Scheme, name: str = "weight") -> Weight:
    """Decode one linear's tensors. Raises CheckpointError, with `name`, on a mismatch.

    `pre_quant_scale` is not folded into the weight: `input_factors` returns it.
    """
    for field in ("weight", "weight_scale"):
        if field not in tensors:
            raise tensor_error(f"{name}.{field}", "is missing")
    if is_fp4(scheme.weight):
        weight = _decode_fp4(tensors, scheme, name)
    elif scheme.weight.type == "int" and scheme.weight.bits == 4:
        weight = _decode_int4(tensors, scheme, name)
    else:
        weight = compressed_tensors.decode(tensors, scheme, name)
    weight.check(name)
    input_factors(tensors, weight.in_features, name)  # raises if they are damaged
    return weight


def input_factors(
    tensors: dict[str, torch.Tensor], in_features: int, name: str
) -> torch.Tensor | None:
    """Return the factors of the inputs, float32 [K]; None if there are none."""
    factors = tensors.get(PRE_SCALE)
    if factors is None:
        return None
    if (
        factors.numel() != in_features
        or not factors.is_floating_point()
        or not torch.isfinite(factors).all()
    ):
        raise tensor_error(
            f"{name}.{PRE_SCALE}",
            f"expected {in_features} finite numbers, found {factors.dtype} {list(factors.shape)}",
        )
    return factors.float().reshape(-1)


def _decode_fp4(tensors: dict[str, torch.Tensor], scheme: Scheme, name: str) -> Fp4Weight:
    factor = tensors.get("weight_scale_2")
    if scheme.weight.type == "nvfp4" and factor is None:
        raise tensor_error(f"{name}.weight_scale_2", "is missing")
    if factor is not None:
        factor = one_scale(factor, f"{name}.weight_scale_2")
    return Fp4Weight(
        bytes_NB=tensors["weight"],
        scales_NG=tensors["weight_scale"],
        global_scale=None,
        global_factor=factor,
        spec=scheme.weight,
    )


def _decode_int4(tensors: dict[str, torch.Tensor], scheme: Scheme, name: str) -> PackedWeight:
    """Decode uint8 [N / 2, K]: the low four bits hold the signed number of an even output."""
    stored, scales_NG, spec = tensors["weight"], tensors["weight_scale"], scheme.weight
    if stored.dtype != torch.uint8 or stored.ndim != 2:
        raise tensor_error(
            f"{name}.weight",
            f"expected uint8 [N / 2, K], found {stored.dtype} {list(stored.shape)}",
        )
    N, K = 2 * stored.shape[0], stored.shape[1]
    spec.check_shape(name, N, K)
    if scales_NG.shape != (N, spec.num_groups(K)):
        raise tensor_error(
            f"{name}.weight_scale",
            f"expected {[N, spec.num_groups(K)]}, found {list(scales_NG.shape)}",
        )
    signed_NK = torch.stack([stored & 15, stored >> 4], 1).flatten(0, 1)
    # two's complement and codes with zero point 8 differ in the highest bit
    weight = PackedWeight.from_codes(signed_NK ^ _SIGN, scales_NG, None, spec, name)
    return replace(weight, activation=scheme.activation)
