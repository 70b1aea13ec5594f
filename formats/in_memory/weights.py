"""Functions on quantized weights in any in-memory form."""

from dataclasses import replace

import torch

from formats.in_memory.dense import DenseWeight
from formats.in_memory.fp4 import Fp4Weight, is_fp4
from formats.in_memory.fp8 import Fp8Weight
from formats.in_memory.k_weight import KWeight, is_k_quant
from formats.in_memory.packed import PackedWeight
from formats.numerics.finite import check_matrix
from formats.scheme import QuantSpec, Scheme

Weight = PackedWeight | Fp8Weight | Fp4Weight | KWeight | DenseWeight


def round_to_nearest(weight_NK: torch.Tensor, spec: QuantSpec, name: str = "weight") -> Weight:
    """Quantize a float weight without calibration. Raises CheckpointError on NaN or infinity."""
    check_matrix(name, weight_NK)
    form = Fp4Weight if is_fp4(spec) else Fp8Weight if spec.type == "float" else PackedWeight
    form = KWeight if is_k_quant(spec) else form
    return form.from_float(weight_NK, spec, name)


def with_activation(
    weight: Weight, scheme: Scheme, input_scale: torch.Tensor | float | None, name: str = "weight"
) -> Weight:
    """Return the weight with its scheme's activation. Raises CheckpointError on a wrong scale."""
    if input_scale is not None:
        input_scale = torch.as_tensor(input_scale, dtype=torch.float32).reshape(())
    weight = replace(weight, activation=scheme.activation, input_scale=input_scale)
    weight.check(name)
    return weight


def merge(parts: list[Weight], name: str = "weight") -> Weight:
    """Stack outputs. Raises CheckpointError if the parts differ."""
    return type(parts[0]).merge(parts, name)


def tensors_of(weight: Weight) -> dict[str, torch.Tensor]:
    """Return the tensors that must be equal in two equal weights, by name."""
    if isinstance(weight, Fp4Weight):
        tensors = {"codes": weight.bytes_NB, "scales": weight.scales_NG.view(torch.uint8)}
        if weight.global_scale is not None:
            tensors["global scale"] = weight.global_scale
        if weight.global_factor is not None:
            tensors["global factor"] = weight.global_factor
    elif isinstance(weight, DenseWeight):
        tensors = {"weight": weight.weight_NK}
    elif isinstance(weight, KWeight):
        tensors = {"blocks": weight.bytes_NX}
    elif isinstance(weight, Fp8Weight):
        tensors = {"codes": weight.codes_NK.view(torch.uint8), "scales": weight.scales_RC}
    else:
        tensors = {
            "codes": weight.words_NW,
            "scales": weight.scales_NG,
            "zeros": weight.zeros_NG,
        }
    for name in ("input_order", "input_scale"):
        if getattr(weight, name) is not None:
            tensors[name] = getattr(weight, name)
    return tensors


def same_weight(left: Weight, right: Weight) -> str | None:
    """Return which of codes, scales, zeros or order differs bitwise; None: nothing."""
    ours, theirs = tensors_of(left), tensors_of(right)
    if ours.keys() != theirs.keys():
        return "kind"
    for name, tensor in ours.items():
        other = theirs[name]
        if tensor.dtype != other.dtype or not torch.equal(tensor, other):
            return name
    return None
