"""State_dict tensors of QuantLinear: GPTQ's, or for 4-bit floats those of compressed-tensors.

Legend: N outputs, K inputs, G groups.
"""

from collections.abc import Mapping
from dataclasses import fields, replace

import torch

from formats.codecs import compressed_tensors, gptq
from formats.errors import CheckpointError, SchemeError
from formats.in_memory.fp4 import SCALE_DTYPES, Fp4Weight
from formats.in_memory.packed import PackedWeight
from formats.layouts import Layout, find_layout
from formats.scheme import (
    FP4_TYPES,
    Scheme,
    fitting_group_size,
    microscaled_inputs,
    w4a8_name,
)

FP4_NAMES = ("weight_packed", "weight_scale")
GLOBAL_SCALE = "weight_global_scale"  # only NVFP4 has it
NAMES = (*gptq.TENSOR_NAMES, *FP4_NAMES, GLOBAL_SCALE)  # all tensor names of both formats
EMPTY_SCALES = {"mxfp4": 255, "nvfp4": 127}  # bytes of scales that are NaN

StoredWeight = PackedWeight | Fp4Weight


def stored_layout(scheme: Scheme) -> Layout:
    """Return the checkpoint format that defines the tensors of a layer with this scheme."""
    return find_layout("compressed-tensors" if scheme.weight.type in FP4_TYPES else "gptq")


def check_storable(scheme: Scheme, subject: str) -> None:
    """Raise SchemeError if QuantLinear's tensors cannot hold weights of this scheme.

    GPTQ has no field for W4A8: only the layer's scheme says that x is rounded.
    """
    if microscaled_inputs(scheme) is not None:
        raise SchemeError(
            f"scheme {scheme}",
            "has inputs that no kernel here rounds",
            f"give {replace(scheme, activation=None)}",
        )
    stored = scheme if w4a8_name(scheme) is None else replace(scheme, activation=None)
    layout = stored_layout(scheme)
    reason = layout.refuses(stored)
    if reason is not None:
        raise SchemeError(
            subject,
            f"QuantLinear cannot hold {scheme}: its tensors are those of {layout.name}, which"
            f" {reason}",
            "TrainableQuantLinear and `qserve quantize` take more schemes",
        )


def stored_names(scheme: Scheme) -> tuple[str, ...]:
    """Return the tensor names of a layer, without the bias."""
    if scheme.weight.type not in FP4_TYPES:
        return gptq.TENSOR_NAMES
    return FP4_NAMES if scheme.weight.type == "mxfp4" else (*FP4_NAMES, GLOBAL_SCALE)


def empty_tensors(
    scheme: Scheme, N: int, K: int, device: torch.device | str | None
) -> dict[str, torch.Tensor]:
    """Return tensors with the shapes of a layer with N outputs and K inputs, without numbers.

    Scales are 0, or NaN where 0 is a scale. `device` None: torch's default device.
    """
    spec = scheme.weight
    G = spec.num_groups(K)
    if spec.type in FP4_TYPES:
        empty = EMPTY_SCALES[spec.type]
        scales = torch.full((N, G), empty, dtype=torch.uint8, device=device)
        tensors = {
            "weight_packed": torch.zeros(N, K // 2, dtype=torch.uint8, device=device),
            "weight_scale": scales.view(SCALE_DTYPES[spec.type]),
            GLOBAL_SCALE: torch.ones(1, dtype=torch.float32, device=device),
        }
        return {name: tensors[name] for name in stored_names(scheme)}
    return {
        "qweight": torch.zeros(K * spec.bits // 32, N, dtype=torch.int32, device=device),
        "qzeros": torch.zeros(G, N * spec.bits // 32, dtype=torch.int32, device=device),
        "scales": torch.zeros(G, N, dtype=torch.float16, device=device),
        "g_idx": torch.arange(K, dtype=torch.int32, device=device) // spec.group_length(K),
    }


def is_empty(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return True if the scales are those of `empty_tensors`."""
    if "scales" in tensors:
        return not tensors["scales"].any()
    scales = tensors["weight_scale"]
    kind = "mxfp4" if scales.dtype == torch.uint8 else "nvfp4"
    return bool((scales.view(torch.uint8) == EMPTY_SCALES[kind]).all())


def encode(weight: StoredWeight) -> dict[str, torch.Tensor]:
    """Return the tensors of a weight, which share no memory with it.

    Raises CheckpointError if the format cannot hold the weight.
    """
    values = [getattr(weight, each.name) for each in fields(weight)]
    given = {_memory(each) for each in values if isinstance(each, torch.Tensor)}
    return {
        name: tensor.clone() if _memory(tensor) in given else tensor
        for name, tensor in _encode(weight).items()
    }


def _memory(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def _encode(weight: StoredWeight) -> dict[str, torch.Tensor]:
    if isinstance(weight, Fp4Weight):
        weight = weight.with_divisor()
        if weight.global_scale is not None and weight.global_scale.numel() != 1:
            raise CheckpointError(
                "QuantLinear",
                f"its {weight.out_features} outputs have several global scales, but its"
                " tensors can store only one",
                "make a layer that only runs, with for_inference",
            )
        return compressed_tensors.encode(weight)
    return gptq.encode(weight)


def decode(tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> StoredWeight:
    """Return the weight in memory form. Raises CheckpointError if the layer is empty or damaged."""
    if scheme.weight.type in FP4_TYPES:
        weight = compressed_tensors.decode(dict(tensors), scheme, "QuantLinear")
    else:
        weight = gptq.decode(dict(tensors), scheme.weight, "QuantLinear")
    return replace(weight, activation=scheme.activation)


def check_shape(scheme: Scheme, name: str, out_features: int, in_features: int) -> None:
    """Raise SchemeError, naming the layer, unless a QuantLinear can have this shape."""
    layout, spec = stored_layout(scheme), scheme.weight
    reason = layout.refuses_shape(scheme, out_features, in_features)
    if reason is not None:
        reason += f", which tensors of {layout.name} require"
        raise SchemeError(name, reason, "leave the layer in float")
    if spec.type == "int" and in_features > 0 and in_features % spec.group_length(in_features):
        fitting = replace(spec, group_size=fitting_group_size([in_features]))
        raise SchemeError(
            name,
            f"its {in_features} inputs are not divisible by the group size {spec.group_size}",
            f"give the scheme {replace(scheme, weight=fitting)}",
        )
    spec.check_shape(name, out_features, in_features)
