"""Schemes and shapes that each format on disk cannot store, each with the reason."""

from collections.abc import Callable

from formats.codecs import compressed_tensors
from formats.numerics.bits import code_multiple
from formats.scheme import CHANNEL, MXFP8, Scheme, microscaled_inputs, w4a8_name

# why weights of these types cannot be written in any format
_WITHOUT_CODES = {
    "nf4": "has no codes for nf4, whose 16 values are not evenly spaced",
    "fp4": "has no codes for bitsandbytes' own fp4 values",
    "floatzero": "stores integer zero points only; rounding these would change the weights",
}


def gptq_refuses(scheme: Scheme) -> str | None:
    spec, activation = scheme.weight, scheme.activation
    if spec.type in _WITHOUT_CODES:
        return _WITHOUT_CODES[spec.type]
    if spec.type != "int":
        return "stores integer codes, not floating point numbers"
    if spec.bits not in (2, 3, 4, 8):
        return f"has 2, 3, 4 or 8 bits, not {spec.bits}"
    if activation is None:
        return None
    if activation.bits != 8:
        return f"holds 8-bit activations only, not {activation.bits}-bit ones"
    if not activation.dynamic:
        return "cannot store a static activation scale"
    if (spec.bits, spec.symmetric, spec.group_size) != (8, True, CHANNEL):
        return "holds 8-bit activations only with symmetric 8-bit weights per channel"
    return None


def awq_refuses(scheme: Scheme) -> str | None:
    if scheme.weight.type in _WITHOUT_CODES:
        return _WITHOUT_CODES[scheme.weight.type]
    if scheme.weight.type != "int" or scheme.activation is not None or scheme.weight.bits != 4:
        return "holds 4-bit weights with 16-bit activations only"
    return None


def compressed_refuses(scheme: Scheme) -> str | None:
    spec = scheme.weight
    if spec.type in _WITHOUT_CODES:
        return _WITHOUT_CODES[spec.type]
    if spec.type == "int" and spec.bits not in compressed_tensors.PACKED_BITS:
        return f"is written with 2 to 8 bits, not {spec.bits}"
    if microscaled_inputs(scheme) is not None:
        return None
    if scheme.activation is not None and scheme.activation.bits != 8:
        return f"is not written with {scheme.activation.bits}-bit activations"
    if w4a8_name(scheme) is not None:
        return None
    if spec.type == "int" and scheme.activation is not None:
        if (spec.bits, spec.symmetric, spec.group_size) != (8, True, CHANNEL):
            return "holds 8-bit activations only with symmetric 8-bit weights per channel"
        if scheme.activation.type != "int":
            return "holds integer weights only with integer activations"
    return None


def needs_multiples(out_multiple: int, in_multiple: int) -> Callable[..., str | None]:
    def refuses_shape(scheme: Scheme, out_features: int, in_features: int) -> str | None:
        if out_features % out_multiple:
            return f"its {out_features} outputs are not divisible by {out_multiple}"
        if in_features % in_multiple:
            return f"its {in_features} inputs are not divisible by {in_multiple}"
        return None

    return refuses_shape


def compressed_refuses_shape(scheme: Scheme, out_features: int, in_features: int) -> str | None:
    spec = scheme.weight
    if spec == MXFP8 and in_features % spec.group_size:
        return f"its {in_features} inputs are not divisible by {spec.group_size}"
    if spec.type != "int":
        return None
    # In memory a row fills whole words, whatever the file's layout is.
    per_word = code_multiple(spec.bits)
    if in_features % per_word:
        return f"its {in_features} inputs are not divisible by {per_word}"
    if not spec.symmetric and out_features % per_word:
        return f"its {out_features} outputs are not divisible by {per_word}"
    return None
