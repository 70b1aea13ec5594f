"""compressed-tensors tensors <-> weights, on the local names of one linear. See formats/README.md.

Layouts: pack-quantized (codes in words), int-quantized (signed int8 codes), float-quantized
(float8), and the microscaling formats MXFP4, NVFP4, MXFP6 and MXFP8. A linear's tensors show which
layout it has. Legend: N outputs, K inputs, G groups.
"""

from dataclasses import replace

import torch

from formats.codecs.group_order import order_of_groups
from formats.codecs.microscaling import MXFP6, decode_mxfp6, decode_mxfp8, exponents_of
from formats.errors import tensor_error
from formats.in_memory.fp4 import Fp4Weight, is_fp4
from formats.in_memory.fp8 import FP8_DTYPE, Fp8Weight, scales_shape
from formats.in_memory.packed import PackedWeight
from formats.in_memory.weights import Weight
from formats.numerics.activation import one_scale
from formats.numerics.bits import code_multiple, pack, packed_length, unpack
from formats.scheme import CHANNEL, MXFP8, Scheme, microscaled_inputs

PACKED, INTEGER, FLOAT = "pack-quantized", "int-quantized", "float-quantized"
# tensors of activation quantization
INPUT_FIELDS = ("input_scale", "input_zero_point", "input_global_scale")
FP4_LAYOUTS = {"mxfp4": "mxfp4-pack-quantized", "nvfp4": "nvfp4-pack-quantized"}
MXFP8_LAYOUT, MXFP6_LAYOUT = "mxfp8-quantized", "mxfp6-pack-quantized"
PACKED_BITS = (2, 3, 4, 5, 6, 7, 8)


def layout_of(scheme: Scheme) -> str:
    """Return the layout in which a scheme is written."""
    if scheme.weight == MXFP8:
        return MXFP8_LAYOUT
    if scheme.weight.type == "float":
        return FLOAT
    if scheme.weight.type in FP4_LAYOUTS:
        return FP4_LAYOUTS[scheme.weight.type]
    return PACKED if scheme.activation is None or scheme.weight.bits < 8 else INTEGER


def encode(weight: Weight, name: str = "weight") -> dict[str, torch.Tensor]:
    """Return the tensors of one linear."""
    if isinstance(weight, Fp8Weight):
        scales = weight.scales_RC
        if weight.spec.rows == -1:
            scales = scales.reshape(1)
        elif weight.spec == MXFP8:
            scales = exponents_of(scales, name)
        tensors = {"weight": weight.codes_NK.contiguous(), "weight_scale": scales.contiguous()}
    elif isinstance(weight, Fp4Weight):
        tensors = {"weight_packed": weight.bytes_NB, "weight_scale": weight.scales_NG}
        if weight.global_scale is not None:
            tensors["weight_global_scale"] = weight.global_scale.reshape(1)
    elif layout_of(weight.scheme) == INTEGER:
        signed = weight.codes().to(torch.int16) - weight.spec.symmetric_zero
        tensors = {"weight": signed.to(torch.int8), "weight_scale": weight.scales_NG}
    else:
        tensors = {
            "weight_packed": weight.words_NW,
            "weight_scale": weight.scales_NG,
            "weight_shape": torch.tensor([weight.out_features, weight.in_features]),
        }
        if not weight.spec.symmetric:
            tensors["weight_zero_point"] = pack(
                _filled(weight.zeros_NG, weight.spec.bits), weight.spec.bits, dim=0
            )
    if weight.input_scale is not None and microscaled_inputs(weight.scheme) is not None:
        tensors["input_global_scale"] = (1 / weight.input_scale.float()).reshape(1)
    elif weight.input_scale is not None:
        tensors["input_scale"] = weight.input_scale.reshape(1)
    return tensors


def decode(tensors: dict[str, torch.Tensor], scheme: Scheme, name: str = "weight") -> Weight:
    """Decode one linear's tensors. Raises CheckpointError, with `name`, on a mismatch."""
    if "weight_scale" not in tensors:
        raise tensor_error(f"{name}.weight_scale", "is missing")
    if is_fp4(scheme.weight):
        weight = _decode_fp4(tensors, scheme, name)
    elif "weight_packed" in tensors and tensors["weight_packed"].dtype == torch.uint8:
        weight = _decode_fp6(tensors, scheme, name)
    elif "weight_packed" in tensors:
        weight = _decode_packed(tensors, scheme, name)
    elif "weight" not in tensors:
        raise tensor_error(name, "has neither weight_packed nor weight")
    elif tensors["weight"].dtype == torch.int8:
        weight = _decode_int8(tensors, scheme, name)
    elif tensors["weight"].dtype == FP8_DTYPE:
        weight = _decode_float(tensors, scheme, name)
    else:
        raise tensor_error(
            f"{name}.weight",
            f"expected int8 or float8_e4m3fn with a weight_scale, found {tensors['weight'].dtype}",
        )
    scale = tensors.get("input_scale")
    if scale is not None:
        scale = one_scale(scale, f"{name}.input_scale")
    weight = replace(weight, activation=scheme.activation, input_scale=scale)
    weight.check(name)
    return weight


def _decode_fp6(tensors: dict[str, torch.Tensor], scheme: Scheme, name: str) -> PackedWeight:
    if scheme.weight != MXFP6:
        raise tensor_error(f"{name}.weight_packed", f"found uint8 for {scheme}")
    return decode_mxfp6(tensors["weight_packed"], tensors["weight_scale"], name)


def _decode_packed(tensors: dict[str, torch.Tensor], scheme: Scheme, name: str) -> PackedWeight:
    spec, words = scheme.weight, tensors["weight_packed"]
    if spec.type != "int" or spec.bits not in PACKED_BITS:
        raise tensor_error(name, f"pack-quantized has 2 to 8 integer bits, found {scheme}")
    if words.dtype != torch.int32 or words.ndim != 2:
        raise tensor_error(
            f"{name}.weight_packed",
            f"expected a 2-d int32 tensor, found {words.dtype} {list(words.shape)}",
        )
    out_features, in_features = _stated_shape(tensors, words, spec.bits, name)
    spec.check_shape(name, out_features, in_features)
    scales_NG = _scales(tensors["weight_scale"], out_features, spec.num_groups(in_features), name)
    if spec.symmetric:
        zeros_NG = torch.full_like(scales_NG, spec.symmetric_zero, dtype=torch.uint8)
    else:
        stored = tensors.get("weight_zero_point")
        rows = -(-out_features * spec.bits // 32)
        if stored is None or stored.dtype != torch.int32:
            raise tensor_error(
                f"{name}.weight_zero_point",
                f"expected packed int32 zeros, found {'none' if stored is None else stored.dtype}",
            )
        if stored.shape != (rows, scales_NG.shape[1]):
            raise tensor_error(
                f"{name}.weight_zero_point",
                f"expected {[rows, scales_NG.shape[1]]}, found {list(stored.shape)}",
            )
        # The library stores only words that contain zeros; `unpack` needs the last one to be full.
        filled = -(-out_features // code_multiple(spec.bits)) * code_multiple(spec.bits)
        stored = torch.nn.functional.pad(stored, (0, 0, 0, packed_length(filled, spec.bits) - rows))
        zeros_NG = unpack(stored, spec.bits, dim=0)[:out_features].contiguous()
    order = None
    if "weight_g_idx" in tensors:
        g_idx = tensors["weight_g_idx"]
        if g_idx.shape != (in_features,):
            raise tensor_error(
                f"{name}.weight_g_idx", f"expected [{in_features}], found {list(g_idx.shape)}"
            )
        order, source, run = order_of_groups(g_idx, scales_NG.shape[1], name)
        if source is not None:
            scales_NG, zeros_NG = scales_NG[:, source], zeros_NG[:, source]
        if run != spec.group_length(in_features):
            spec = replace(spec, group_size=CHANNEL if run == in_features else run)
        if order is not None:
            words = pack(unpack(words, spec.bits)[:, order], spec.bits)
    return PackedWeight(
        words_NW=words,
        scales_NG=scales_NG.contiguous(),
        zeros_NG=zeros_NG.contiguous(),
        spec=spec,
        in_features=in_features,
        input_order=order,
    )


def _decode_int8(tensors: dict[str, torch.Tensor], scheme: Scheme, name: str) -> PackedWeight:
    spec, signed = scheme.weight, tensors["weight"]
    if spec.type != "int" or signed.ndim != 2:
        raise tensor_error(f"{name}.weight", f"found int8 {list(signed.shape)} for {scheme}")
    spec.check_shape(name, *signed.shape)
    scales_NG = _scales(
        tensors["weight_scale"], signed.shape[0], spec.num_groups(signed.shape[1]), name
    )
    zeros_NG = None
    if "weight_zero_point" in tensors:
        stored = tensors["weight_zero_point"]
        if stored.shape != scales_NG.shape or stored.is_floating_point():
            raise tensor_error(
                f"{name}.weight_zero_point",
                f"expected integers {list(scales_NG.shape)}, found {list(stored.shape)}",
            )
        zeros_NG = stored.to(torch.int16) + spec.symmetric_zero
    codes_NK = signed.to(torch.int16) + spec.symmetric_zero
    return PackedWeight.from_codes(codes_NK, scales_NG, zeros_NG, spec, name)


def _decode_fp4(tensors: dict[str, torch.Tensor], scheme: Scheme, name: str) -> Fp4Weight:
    if "weight_packed" not in tensors:
        raise tensor_error(f"{name}.weight_packed", "is missing")
    scales, whole = tensors["weight_scale"], tensors.get("weight_global_scale")
    if whole is not None:
        whole = one_scale(whole, f"{name}.weight_global_scale")
    weight = Fp4Weight(
        bytes_NB=tensors["weight_packed"],
        scales_NG=scales,
        global_scale=whole,
        spec=scheme.weight,
    )
    weight.check(name)
    return weight


def _decode_float(tensors: dict[str, torch.Tensor], scheme: Scheme, name: str) -> Fp8Weight:
    spec, codes, scales = scheme.weight, tensors["weight"], tensors["weight_scale"]
    if spec.type != "float" or codes.ndim != 2 or not codes.numel():
        raise tensor_error(f"{name}.weight", f"found float8 {list(codes.shape)} for {scheme}")
    shape = scales_shape(spec, *codes.shape)
    if spec == MXFP8 and scales.dtype == torch.uint8:
        if scales.shape != shape:
            raise tensor_error(
                f"{name}.weight_scale", f"expected {list(shape)}, found {list(scales.shape)}"
            )
        return decode_mxfp8(codes, scales, name)
    if scales.numel() != shape[0] * shape[1] or (scales.ndim == 2 and scales.shape != shape):
        raise tensor_error(
            f"{name}.weight_scale", f"expected {list(shape)}, found {list(scales.shape)}"
        )
    return Fp8Weight(codes_NK=codes, scales_RC=scales.reshape(shape), spec=spec)


def _stated_shape(
    tensors: dict[str, torch.Tensor], words: torch.Tensor, bits: int, name: str
) -> tuple[int, int]:
    """Return [N, K] from weight_shape, checked against the words; without it, from the words."""
    shape = tensors.get("weight_shape")
    if shape is None:
        return words.shape[0], words.shape[1] * 32 // bits
    if shape.numel() != 2 or shape.is_floating_point():
        raise tensor_error(f"{name}.weight_shape", f"expected [N, K], found {list(shape.shape)}")
    out_features, in_features = shape.flatten().tolist()
    if in_features < 1 or words.shape != (out_features, packed_length(in_features, bits)):
        raise tensor_error(
            f"{name}.weight_shape",
            f"states {[out_features, in_features]}, weight_packed has {list(words.shape)} words",
        )
    return out_features, in_features


def _scales(scales: torch.Tensor, out_features: int, num_groups: int, name: str) -> torch.Tensor:
    """Return scales [N, G]; one scale for the whole tensor is repeated for each output."""
    if scales.numel() == 1 and num_groups == 1:
        scales = scales.reshape(1, 1).expand(out_features, 1)
    elif scales.shape == (out_features,) and num_groups == 1:
        scales = scales[:, None]
    if scales.shape != (out_features, num_groups):
        raise tensor_error(
            f"{name}.weight_scale",
            f"expected {[out_features, num_groups]}, found {list(scales.shape)}",
        )
    return scales.contiguous()


def _filled(zeros_NG: torch.Tensor, bits: int) -> torch.Tensor:
    """Pad zeros with rows until they fill whole words."""
    return torch.nn.functional.pad(zeros_NG, (0, 0, 0, -zeros_NG.shape[0] % code_multiple(bits)))
