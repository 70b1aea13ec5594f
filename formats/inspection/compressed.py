"""Checks of a compressed-tensors linear. Reads its small tensors.

Legend: N outputs, K inputs, G groups.
"""

import torch

from formats.errors import InputError
from formats.in_memory.fp4 import is_fp4
from formats.in_memory.fp8 import FP8_DTYPE, scales_shape
from formats.inspection.files import Shards
from formats.inspection.findings import Findings
from formats.inspection.linear_summary import LinearSummary, check_scales, decoded_linear
from formats.layouts import decode_linear, layout_of, tensor_names
from formats.numerics.activation import check_input_scale
from formats.numerics.bits import packed_length
from formats.quant_config import QuantConfig
from formats.scheme import MXFP8, Scheme


def compressed_linear(
    name: str, shards: Shards, scheme: Scheme, quant: QuantConfig, findings: Findings
) -> LinearSummary | None:
    """Check a linear's tensors against each other and the config; None if its shape is unknown."""
    names = tensor_names(name, layout_of(quant), shards.entries)
    found = {field: shards.entries[full] for field, full in names.items()}
    if "weight_scale" not in found:
        if f"{name}.weight_scale" not in shards.lost:
            findings.error(f"{name}.weight_scale", "is missing", "the checkpoint is incomplete")
        return None
    shape = _shape(name, found, scheme, shards, findings)
    if shape is None:
        return None
    out_features, in_features = shape
    if _is_microscaled(scheme, found):
        return _microscaled_linear(name, names, scheme, quant, shards, findings)
    scales = found["weight_scale"].shape
    expected = scales_shape(scheme.weight, *shape)
    if scheme.weight.type == "int" and in_features % scheme.weight.group_length(in_features):
        findings.error(name, f"{in_features} inputs have no whole groups in {scheme}")
    if scheme.weight.type == "int":  # scales per row may be 1-d, or one for all rows
        flat = expected[1] == 1 and (_count(scales) == 1 or scales == expected[:1])
    else:
        flat = len(scales) != 2 and _count(scales) == _count(expected)
    if scales != expected and not flat:
        findings.error(
            f"{name}.weight_scale", f"expected {list(expected)} for {scheme}, found {list(scales)}"
        )
        return None
    check_scales(names["weight_scale"], shards, findings)
    traits = set()
    static = scheme.activation is not None and not scheme.activation.dynamic
    if quant.unrounded_inputs:
        traits.add("unrounded inputs")
    elif static != ("input_scale" in found):
        findings.error(
            f"{name}.input_scale",
            _missing("input_scale", quant)
            if static
            else "is there, but config.json states no static activations",
        )
    elif static:
        scale = shards.load(names["input_scale"], findings)
        try:
            if scale is not None:
                check_input_scale(scheme.activation, scale, name)
        except InputError as error:
            findings.caught(error)
    has_8bit_inputs = scheme.activation is not None and scheme.activation.bits == 8
    is_below_8 = scheme.weight.type == "int" and scheme.weight.bits < 8
    if is_below_8 and has_8bit_inputs and "weight_packed" not in found:
        traits.add("codes in bytes")
    if scheme.weight.symmetric and "weight_zero_point" in found:
        traits.add("weight zeros")
        findings.warning(f"{name}.weight_zero_point", "is there, though the scheme is symmetric")
    if not scheme.weight.symmetric:
        _check_zeros(name, found, scheme, (out_features, expected[1]), shards, findings)
    if "weight_g_idx" in found:
        g_idx = shards.load(names["weight_g_idx"], findings)
        length = scheme.weight.group_length(in_features)
        if g_idx is not None and not torch.equal(g_idx.long(), torch.arange(in_features) // length):
            traits.add("act-order")
    return LinearSummary(
        name=name,
        out_features=out_features,
        in_features=in_features,
        scheme=str(scheme),
        num_bytes=sum(entry.num_bytes for entry in found.values()),
        traits=frozenset(traits),
    )


def _is_microscaled(scheme: Scheme, found: dict) -> bool:
    """Return True for MXFP4, NVFP4, MXFP6 and MXFP8, whose scales belong to small groups."""
    small = found["weight_scale"].dtype == torch.uint8
    packed = found.get("weight_packed")
    is_fp6 = packed is not None and packed.dtype == torch.uint8
    return is_fp4(scheme.weight) or is_fp6 or (scheme.weight == MXFP8 and small)


def _microscaled_linear(
    name: str,
    names: dict[str, str],
    scheme: Scheme,
    quant: QuantConfig,
    shards: Shards,
    findings: Findings,
) -> LinearSummary | None:
    """Check a linear in one of these formats by decoding it."""
    return decoded_linear(
        name,
        names,
        lambda tensors: decode_linear(name, tensors, quant),
        shards,
        findings,
        scheme=scheme,
        traits=frozenset({"unrounded inputs"} if quant.unrounded_inputs else ()),
    )


def _check_zeros(
    name: str,
    found: dict,
    scheme: Scheme,
    groups_NG: tuple[int, int],
    shards: Shards,
    findings: Findings,
) -> None:
    """Check the zero points of asymmetric packed codes, int32 words along N; skip other zeros."""
    full, entry = f"{name}.weight_zero_point", found.get("weight_zero_point")
    if entry is None:
        if full not in shards.lost:
            findings.error(full, "is missing", "the checkpoint is incomplete")
        return
    wanted = (-(-groups_NG[0] * scheme.weight.bits // 32), groups_NG[1])
    if "weight_packed" in found and (entry.dtype != torch.int32 or entry.shape != wanted):
        findings.error(
            full, f"expected torch.int32 {list(wanted)}, found {entry.dtype} {list(entry.shape)}"
        )


def _shape(
    name: str, found: dict, scheme: Scheme, shards: Shards, findings: Findings
) -> tuple[int, int] | None:
    """Return [N, K] if the weight's tensors agree on it."""
    if "weight_packed" not in found:
        wanted = FP8_DTYPE if scheme.weight.type == "float" else torch.int8
        entry = found.get("weight")
        if entry is None:
            if f"{name}.weight" not in shards.lost and f"{name}.weight_packed" not in shards.lost:
                findings.error(name, "has neither weight nor weight_packed")
            return None
        if entry.dtype != wanted or len(entry.shape) != 2:
            findings.error(
                entry.name, f"expected {wanted} [N, K], found {entry.dtype} {list(entry.shape)}"
            )
            return None
        return entry.shape
    entry = found["weight_packed"]
    if is_fp4(scheme.weight):
        return entry.shape[0], 2 * entry.shape[-1]
    if entry.dtype == torch.uint8 and len(entry.shape) == 2:  # MXFP6: four numbers in three bytes
        return entry.shape[0], entry.shape[1] * 4 // 3
    if entry.dtype != torch.int32 or len(entry.shape) != 2 or scheme.weight.type == "float":
        findings.error(
            entry.name, f"found {entry.dtype} {list(entry.shape)} for the scheme {scheme}"
        )
        return None
    out_features, words = entry.shape
    in_features = words * 32 // scheme.weight.bits
    if "weight_shape" in found:
        stated = shards.load(f"{name}.weight_shape", findings)
        if stated is None:
            return None
        if stated.is_floating_point():
            findings.error(f"{name}.weight_shape", f"expected integers, found {stated.dtype}")
            return None
        if stated.numel() == 2:
            in_features = int(stated.flatten()[1])
        try:
            fits = stated.flatten().tolist() == [out_features, in_features]
            fits = fits and words == packed_length(in_features, scheme.weight.bits)
        except InputError:
            fits = False
        if not fits:
            findings.error(
                f"{name}.weight_shape",
                f"states {stated.flatten().tolist()[:4]}, weight_packed has {list(entry.shape)}",
            )
            return None
    return out_features, in_features


def _missing(field: str, quant: QuantConfig) -> str:
    """Return the message for a tensor that is missing under all of its names."""
    others = [name for name, own in layout_of(quant).aliases.items() if own == field]
    return "is missing" + "".join(f", and so is {name}" for name in others)


def _count(shape: tuple[int, ...]) -> int:
    number = 1
    for extent in shape:
        number *= extent
    return number
