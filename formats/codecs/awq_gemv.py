"""AWQ "GEMV" tensors -> PackedWeight, on the local names of one linear. Read only.

AutoAWQ's layout for products with one row of x. Codes are packed along the inputs without
interleaving, as in compressed-tensors. Zeros and scales are padded to whole cache lines. Legend: N
outputs, K inputs, G groups, P groups with padding.
"""

import torch

from formats.errors import tensor_error
from formats.in_memory.packed import PackedWeight
from formats.numerics.bits import unpack
from formats.scheme import QuantSpec

REQUIRED = ("qweight", "qzeros", "scales")


def decode(tensors: dict[str, torch.Tensor], spec: QuantSpec, name: str = "weight") -> PackedWeight:
    """Decode one linear's tensors. Raises CheckpointError."""
    missing = [field for field in REQUIRED if field not in tensors]
    if missing:
        raise tensor_error(name, f"tensors missing: {', '.join(missing)}")
    qweight_NW, qzeros, scales = (tensors[field] for field in REQUIRED)
    for field, tensor in (("qweight", qweight_NW), ("qzeros", qzeros)):
        if tensor.dtype != torch.int32 or tensor.ndim != 2:
            raise tensor_error(
                f"{name}.{field}",
                f"expected a 2-d int32 tensor, found {tensor.dtype} {list(tensor.shape)}",
            )
    out_features, in_features = qweight_NW.shape[0], qweight_NW.shape[1] * 8
    spec.check_shape(name, out_features, in_features)
    num_groups = spec.num_groups(in_features)
    padded = 8 * qzeros.shape[1]
    if (
        qzeros.shape[0] != out_features
        or scales.shape != (out_features, padded)
        or padded < num_groups
    ):
        raise tensor_error(
            name,
            f"expected qzeros [{out_features}, P / 8] and scales [{out_features}, P] with P at"
            f" least {num_groups}, found {list(qzeros.shape)} and {list(scales.shape)}",
        )
    packed = PackedWeight(
        words_NW=qweight_NW.contiguous(),
        scales_NG=scales[:, :num_groups].contiguous(),
        zeros_NG=unpack(qzeros, spec.bits)[:, :num_groups].contiguous(),
        spec=spec,
        in_features=in_features,
    )
    packed.check(name)
    return packed
