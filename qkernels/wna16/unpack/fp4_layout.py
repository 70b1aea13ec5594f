"""Prepacked 4-bit floats: their bits in a word, and the scales that kernels read.

A word has eight numbers, four in each half: A, B, C and D, in the order in which integer codes are
at bits 0, 4, 8 and 12. A number is a sign and three bits of magnitude:

    bit        15  14  13  12 | 11 10  9 |  8  7  6 |  5  4  3 |  2  1  0
    sign of     A   D   C   B | magn. D  | magn. A  | magn. B  | magn. C

So a mask turns A into a bfloat16 number, and a shift by 3 and the same mask do so for B: with its
magnitude at bits 6 to 8, where the exponent begins, the bfloat16 number is 2^-126 times the value,
subnormal or not. float16 needs the magnitude at bits 9 to 11, for 2^-14 times the value. In both
types, the product with the group's scale is exact or rounded once.

The scale of a group is a byte, from which kernels make a 16-bit float by a shift and an addition.
For MXFP4 the byte is an exponent relative to the largest of its row; for NVFP4 it has five bits of
exponent and three of mantissa. The remaining factor, a float32 per output, multiplies the sums.

Legend: N outputs, K inputs, G groups; BK inputs of a K step.
"""

from typing import NamedTuple

import torch

from formats.in_memory.fp4 import EXPONENT_BIAS, Fp4Weight
from qkernels.gpu.config import ceil_div
from qkernels.gpu.workspace import workspace
from qkernels.linear.prepared import PreparedWeight
from qkernels.wna16.layout import TILE_N, Fp4Spec, fp4_spec, padded_n

SIGN_BITS = (15, 12, 13, 14)  # bits of A, B, C, D
MAGNITUDE_BITS = (6, 3, 0, 9)
WORD_INPUTS = 32  # inputs that four words share, eight each
# Exponent bits of the 16-bit float for the largest MXFP4 scale of a row.
LARGEST_EXPONENT = {torch.float16: 30, torch.bfloat16: 254}
NVFP4_EXPONENT = 21  # added to the exponent of a float8 scale
# Kernels also multiply by these numbers; the factors of outputs compensate.
MXFP4_SHRINK, NVFP4_SHRINK = 2.0, 2.0**-8
STEP_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # scale bytes per step -> dtype


class Fp4Words(NamedTuple):
    """How kernels make numbers from words and scales from bytes; a constexpr of the kernels."""

    parts: int  # groups per 32 inputs: 1 or 2
    scale_factor: int  # multiplies a scale's byte, for both halves of a word
    scale_addend: int
    field_mask: int
    to_field: int  # bits by which the magnitude of A is shifted left
    number_factor: float  # factor of the numbers that are made from words
    ptx: str
    outputs: str = "=&r,=&r,=&r,=&r,r,r,r"


def fp4_words(spec: object, dtype: torch.dtype) -> Fp4Words | None:
    """Return the Fp4Words of a prepacked weight; None: it is not in 4-bit floats."""
    if not isinstance(spec, Fp4Spec):
        return None
    is_float16 = dtype == torch.float16
    mantissa, to_field = (10, 3) if is_float16 else (7, 0)
    addend, shift = 0, mantissa
    if spec.floats == "nvfp4":
        shift -= 3
        addend = 0 if is_float16 else 0x70007000
    return Fp4Words(
        parts=WORD_INPUTS // spec.group,
        scale_factor=0x00010001 << shift,
        scale_addend=addend,
        field_mask=0x01C001C0 << to_field,
        to_field=to_field,
        number_factor=2.0**14 if is_float16 else 2.0**126,
        ptx=fp4_ptx(is_float16),
    )


def fp4_ptx(is_float16: bool) -> str:
    """Return PTX that multiplies a word's numbers by scales: pairs A, B, C and D to $0 to $3.

    $4 is the word, $5 the scales of A and B, $6 those of C and D; each scale is twice in its word.
    """
    to_field = 3 if is_float16 else 0
    field, sign = 0x01C001C0 << to_field, 0x80008000
    lines = ["{ .reg .b32 b, c, z; mov.b32 z, 0x80008000;"]
    for out in range(4):
        left, sign_left = 6 - MAGNITUDE_BITS[out] + to_field, 15 - SIGN_BITS[out]
        number, sign_word = "$4", "$4"
        if left:
            shift = "shl.b32" if left > 0 else "shr.u32"
            lines.append(f"{shift} b, $4, {abs(left)};")
            number = "b"
        if left == sign_left:
            lines.append(f"and.b32 b, {number}, {field | sign:#x};")
        else:
            lines.append(f"and.b32 b, {number}, {field:#x};")
            if sign_left:
                lines.append(f"shl.b32 c, $4, {sign_left};")
                sign_word = "c"
            lines.append(f"lop3.b32 b, {sign_word}, {sign:#x}, b, 0xEA;")  # (a & b) | c
        scale = "$5" if out < 2 else "$6"
        if is_float16:
            lines.append(f"mul.f16x2 ${out}, b, {scale};")
        else:  # sm_80 has no bfloat16 product, but a multiply-add; -0.0 is added
            lines.append(f"fma.rn.bf16x2 ${out}, b, {scale}, z;")
    return " ".join(lines) + " }"


def fp4_order(codes_NK: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit floats [N, K] into words, int32 [N, K / 8].

    The layout repeats every 32 inputs. Input k = 16 i + 8 h + 2 t + e is number ABCD[2 i + h] in
    half e of word t.
    """
    codes_NKihte = codes_NK.to(torch.int32).unflatten(1, (-1, 2, 2, 4, 2))
    words_NKt = torch.zeros_like(codes_NKihte[:, :, 0, 0, :, 0])
    for number in range(4):
        for e in range(2):
            codes = codes_NKihte[:, :, number // 2, number % 2, :, e]
            words_NKt |= (codes & 7) << (MAGNITUDE_BITS[number] + 16 * e)
            words_NKt |= (codes >> 3) << (SIGN_BITS[number] + 16 * e)
    return words_NKt.flatten(1)


def prepare_fp4(
    weight: Fp4Weight, dtype: torch.dtype, device: torch.device | str | None = None
) -> PreparedWeight:
    """Prepack a weight in 4-bit floats: words, scale bytes, and a factor for each output.

    Weights are exact, except those that float16 cannot represent: with MXFP4 scales below 2^-24 of
    the largest scale of their row.
    """
    weight = weight if device is None else weight.to(device)
    spec = fp4_spec(weight.spec, weight.in_features)
    step, bytes_NB = spec.group_size, weight.bytes_NB
    steps = ceil_div(weight.in_features, step)
    codes_NK = torch.stack([bytes_NB & 15, bytes_NB >> 4], -1).flatten(1)
    scales_NG, factors_N = _scales(weight, dtype)
    signs_NG = weight.scales_NG.float().sign()
    if weight.spec.type == "nvfp4" and not (signs_NG > 0).all():  # bytes hold only positive scales
        signs_NK = signs_NG.repeat_interleave(spec.group, 1)
        codes_NK = torch.where(signs_NK < 0, codes_NK ^ 8, codes_NK).masked_fill(signs_NK == 0, 0)
    codes_NK = torch.nn.functional.pad(codes_NK, (0, steps * step - weight.in_features))
    missing = steps * step // spec.group - scales_NG.shape[1]
    scales_NG = torch.nn.functional.pad(scales_NG, (0, missing))
    words = _padded(fp4_order(codes_NK)).unflatten(1, (steps, step // WORD_INPUTS, 4))
    words = words.unflatten(0, (-1, TILE_N)).permute(0, 2, 1, 4, 3)
    # [N/64, 64, steps, C, parts] -> [N/64, steps, 64, parts, C], where C bytes are one integer
    per_step, parts = step // WORD_INPUTS, WORD_INPUTS // spec.group
    scales = _padded(scales_NG).unflatten(1, (steps, per_step, parts)).unflatten(0, (-1, TILE_N))
    scales = scales.permute(0, 2, 1, 4, 3).flatten().view(STEP_DTYPES[per_step])
    tensors = {
        "packed": words.contiguous(),  # int32 [N/64, steps, 64, 4, C]
        "scales": scales.view(-1, steps, TILE_N, parts),
        "blocks": _padded(factors_N[:, None]).view(-1, TILE_N),  # float32 [N/64, 64]
    }
    workspace(weight.device)
    return PreparedWeight(
        kernel="w4a16",
        tensors=tensors,
        spec=spec,
        out_features=weight.out_features,
        in_features=weight.in_features,
        dtype=dtype,
    )


def _padded(rows: torch.Tensor) -> torch.Tensor:
    missing = padded_n(rows.shape[0]) - rows.shape[0]
    return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing else rows


def _scales(weight: Fp4Weight, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of the scales' magnitudes [N, G], and the factors float32 [N]."""
    if weight.spec.type == "mxfp4":
        exponents_NG = weight.scales_NG.int()
        largest_N1 = exponents_NG.amax(1, keepdim=True)
        bytes_NG = (exponents_NG - largest_N1 + LARGEST_EXPONENT[dtype]).clamp(min=0)
        factors_N1 = torch.exp2(largest_N1.double() - EXPONENT_BIAS) / MXFP4_SHRINK
        return bytes_NG.to(torch.uint8), factors_N1.float().flatten()
    mantissa_NG, exponent_NG = torch.frexp(weight.scales_NG.float().abs())
    # the mantissa is at least 0.5, so three bits remain for its fraction
    bytes_NG = 8 * (exponent_NG - 1 + NVFP4_EXPONENT) + (16 * mantissa_NG - 8).int()
    bytes_NG = bytes_NG.masked_fill(weight.scales_NG.float() == 0, 0)
    if weight.global_factor is not None:
        whole = weight.global_factor.float()
    else:
        whole = 1 / weight.global_scale.float()
    factors_N1 = (whole / NVFP4_SHRINK).expand(weight.out_features, 1)
    return bytes_NG.to(torch.uint8), factors_N1.flatten().contiguous()
