"""Plain torch references of the linear operations, for every kind of weight.

They define the results of the kernels. Legend: M rows of x, K inputs, N outputs, G groups.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F

from formats.in_memory.fp4 import Fp4Weight
from formats.in_memory.fp8 import Fp8Weight
from formats.in_memory.k_weight import KWeight
from formats.in_memory.packed import PackedWeight
from formats.in_memory.weights import Weight
from formats.numerics import affine
from formats.numerics.bits import unpack
from formats.numerics.multiples import find_multiples
from qkernels.linear.plan import GemmPlan
from qkernels.linear.prepared import PreparedWeight
from qkernels.operands.codes import Codes
from qkernels.operands.forms import LinearInput
from qkernels.operands.limbs import Limbs
from qkernels.operands.limbs_reference import from_limbs
from qkernels.rowwise.reference import quantize_input

# Largest K for which a float32 product of int8 codes is exact: 2^10 * 2^7 * 2^7 = 2^24.
EXACT_INPUTS = 1024


def prepare_weight(
    packed: Weight, dtype: torch.dtype, device: torch.device | str | None = None
) -> PreparedWeight:
    """Keep the codes packed; `linear` dequantizes them at every call.

    If x is rounded to int8, symmetric 8-bit codes with one scale per output become int8; also
    4-bit codes in groups, if the scales of each row are multiples of one number.
    """
    packed = packed if device is None else packed.to(device)
    if isinstance(packed, KWeight):
        tensors = {"blocks": packed.bytes_NX}
        if packed.inputs is not None:
            tensors["inputs"] = torch.tensor(packed.inputs)
    elif isinstance(packed, Fp4Weight):
        tensors = {"fp4": packed.bytes_NB, "scales": packed.scales_NG}
        for name in ("global_scale", "global_factor"):
            if getattr(packed, name) is not None:
                tensors[name] = getattr(packed, name)
    elif isinstance(packed, Fp8Weight):
        tensors = {"fp8": packed.codes_NK, "scales": packed.scales_RC}
    elif _is_int8(packed):
        tensors = {"int8": signed_codes(packed), "scales": packed.scales_NG.float()}
    elif (found := int8_form(packed)) is not None:
        tensors = {"int8": found[0], "scales": found[1]}
    else:
        tensors = {
            "words": packed.words_NW,
            "scales": packed.scales_NG,
            "zeros": packed.zeros_NG,
        }
    return PreparedWeight.of(
        packed, kernel="reference", tensors=tensors, dtype=dtype, rounds_input=True
    )


def run(
    plan: GemmPlan, x: LinearInput, weight: PreparedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply x [M, K], given as a tensor, codes or limbs. Returns [M, N]."""
    if isinstance(x, Codes):
        return linear_codes(*x, weight, bias)
    return linear(x, weight, bias)


def linear(
    x: LinearInput, weight: PreparedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply x [..., K] to [..., N]. With 8-bit activations, x is rounded to codes first."""
    if isinstance(x, Limbs):
        x = from_limbs(x).to(weight.dtype)
    if weight.activation is None:
        return F.linear(x, _dequantize(weight).to(weight.dtype), bias)
    x_MK = x.reshape(-1, weight.in_features)
    codes = quantize_input(x_MK, weight.activation, weight.tensors.get("input_scale"))
    return linear_codes(*codes, weight, bias).view(*x.shape[:-1], weight.out_features)


def linear_codes(
    codes_MK: torch.Tensor,
    scales_MS: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply codes [M, K] with S scales per row. Returns [M, N], rounded once at the end."""
    tensors = weight.tensors
    if "int8" in tensors:
        sums_MN = int8_matmul(codes_MK, tensors["int8"])
        return scale_sums(sums_MN, scales_MS, weight, bias)
    if _sums_integers(weight):
        return _linear_groups(codes_MK, scales_MS, weight, bias)
    x_MK = codes_MK.float().unflatten(1, (scales_MS.shape[1], -1)) * scales_MS[..., None]
    x_MK = x_MK.flatten(1)[:, : weight.in_features]
    y_MN = x_MK @ _dequantize(weight).t()
    if bias is not None:
        y_MN = y_MN + bias.float()
    return y_MN.to(weight.dtype)


def scale_sums(
    sums_MN: torch.Tensor,
    scales_M1: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply both scales to exact int32 sums [M, N] and add the bias."""
    y_MN = sums_MN.float() * scales_M1 * weight.tensors["scales"].t()
    if bias is not None:
        y_MN = y_MN + bias.float()
    return y_MN.to(weight.dtype)


def _linear_groups(
    codes_MK: torch.Tensor,
    scales_M1: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Implement linear_codes for packed symmetric integer codes, with exact sums in each group."""
    words, scales_NG = weight.tensors["words"], weight.tensors["scales"]
    signed_NK = unpack(words, weight.spec.bits).to(torch.int16) - weight.spec.symmetric_zero
    group = weight.spec.group_length(weight.in_features)
    pairs = zip(codes_MK.split(group, 1), signed_NK.split(group, 1), strict=True)
    sums = (int8_matmul(x, w) for x, w in pairs)
    return scale_group_sums(sums, scales_M1, scales_NG.float().t(), bias, weight.dtype)


def scale_group_sums(
    sums: Iterable[torch.Tensor],
    scales_M1: torch.Tensor,
    scales_GN: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Scale each group's exact int32 sums [M, N], add the groups in float32 in order, round once.

    With a single group, the product is scaled at the end, as in scale_sums.
    """
    if scales_GN.shape[0] == 1:
        (only,) = sums
        y_MN = only.float() * scales_M1 * scales_GN
    else:
        y_MN = torch.zeros(scales_M1.shape[0], scales_GN.shape[1], device=scales_M1.device)
        for group_MN, scales_N in zip(sums, scales_GN, strict=True):
            y_MN += group_MN.float() * scales_N
        y_MN *= scales_M1
    if bias is not None:
        y_MN = y_MN + bias.float()
    return y_MN.to(dtype)


def int8_matmul(a_MK: torch.Tensor, b_NK: torch.Tensor) -> torch.Tensor:
    """Multiply int8 codes with exact sums. Returns int32 [M, N]."""
    total_MN = torch.zeros(a_MK.shape[0], b_NK.shape[0], dtype=torch.int32, device=a_MK.device)
    for a, b in zip(a_MK.split(EXACT_INPUTS, 1), b_NK.split(EXACT_INPUTS, 1), strict=True):
        total_MN += (a.float() @ b.float().t()).to(torch.int32)
    return total_MN


def signed_codes(packed: PackedWeight) -> torch.Tensor:
    """Return symmetric codes minus their zero point, int8 [N, K]."""
    return (packed.codes().to(torch.int16) - packed.spec.symmetric_zero).to(torch.int8)


def int8_form(packed: Weight) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return a 4-bit weight in groups as (int8 [N, K], float32 scales [N, 1]), exactly.

    None, if its products are not sums of integers or a row's scales are not multiples of one number
    (formats/numerics/multiples.py).
    """
    if not isinstance(packed, PackedWeight) or not packed.scheme.sums_integers:
        return None
    found = find_multiples(packed.scales_NG)
    if found is None:
        return None
    units_N1, multiples_NG = found
    groups_NGL = signed_codes(packed).unflatten(1, (multiples_NG.shape[1], -1))
    return (groups_NGL * multiples_NG[..., None]).flatten(1), units_N1


def _sums_integers(weight: PreparedWeight) -> bool:
    """Return True if both sides are symmetric integers and x has one scale per row."""
    activation, spec = weight.activation, weight.spec
    is_integer = activation.type == "int" and activation.per != "group" and spec.type == "int"
    return is_integer and spec.symmetric and "words" in weight.tensors


def _is_int8(packed: PackedWeight) -> bool:
    spec, activation = packed.spec, packed.activation
    return (
        activation is not None
        and activation.type == "int"
        and activation.per != "group"
        and (spec.bits, spec.symmetric) == (8, True)
        and packed.scales_NG.shape[1] == 1
    )


def _dequantize(weight: PreparedWeight) -> torch.Tensor:
    """Return the weight in float32 [N, K]."""
    tensors = weight.tensors
    if "blocks" in tensors:
        inputs = tensors.get("inputs")
        inputs = None if inputs is None else tuple(inputs.tolist())
        blocks = KWeight(bytes_NX=tensors["blocks"], spec=weight.spec, inputs=inputs)
        return blocks.dequantize()
    if "fp4" in tensors:
        return Fp4Weight(
            bytes_NB=tensors["fp4"],
            scales_NG=tensors["scales"],
            global_scale=tensors.get("global_scale"),
            global_factor=tensors.get("global_factor"),
            spec=weight.spec,
        ).dequantize()
    if "fp8" in tensors:
        return Fp8Weight(
            codes_NK=tensors["fp8"], scales_RC=tensors["scales"], spec=weight.spec
        ).dequantize()
    codes_NK = unpack(tensors["words"], weight.spec.bits)
    return affine.dequantize(codes_NK, tensors["scales"], tensors["zeros"])
