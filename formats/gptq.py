"""GPTQ tensors <-> PackedWeight, on the local names of one linear. Byte layout: formats/README.md.

The v1 rule "the file stores the zero point minus one" exists here and nowhere else.
"""

import torch

from formats.bits import pack, packed_length, unpack
from formats.errors import CheckpointError
from formats.packed import PackedWeight
from formats.scheme import QuantSpec

TENSOR_NAMES = ("qweight", "qzeros", "scales", "g_idx")


def encode(packed: PackedWeight, name: str = "weight") -> dict[str, torch.Tensor]:
    """The GPTQ v1 tensors of one linear. Raises CheckpointError where v1 cannot hold a zero."""
    spec = packed.spec
    if (packed.zeros_NG == 0).any():
        raise CheckpointError(
            name,
            "a zero point of 0 cannot be stored in GPTQ v1, which stores the zero point minus one",
            "use a symmetric scheme",
        )
    group = spec.group_length(packed.in_features)
    stored_zeros_GN = (packed.zeros_NG - 1).t()
    return {
        "qweight": packed.words_NW.t().contiguous(),
        "qzeros": pack(stored_zeros_GN, spec.bits),
        "scales": packed.scales_NG.t().contiguous(),
        "g_idx": torch.arange(packed.in_features, dtype=torch.int32, device=packed.device) // group,
    }


def decode(tensors: dict[str, torch.Tensor], spec: QuantSpec, name: str = "weight") -> PackedWeight:
    """Read one linear's GPTQ v1 tensors. `g_idx` may be absent. Raises CheckpointError."""
    missing = {"qweight", "qzeros", "scales"} - tensors.keys()
    if missing:
        raise CheckpointError(name, f"tensors missing: {', '.join(sorted(missing))}")
    qweight, qzeros, scales_GN = tensors["qweight"], tensors["qzeros"], tensors["scales"]
    for field in ("qweight", "qzeros"):
        if tensors[field].dtype != torch.int32 or tensors[field].ndim != 2:
            raise CheckpointError(
                f"{name}.{field}",
                f"expected a 2-d int32 tensor, found {tensors[field].dtype}"
                f" {list(tensors[field].shape)}",
            )
    in_features, out_features = qweight.shape[0] * 32 // spec.bits, qweight.shape[1]
    spec.check_shape(name, out_features, in_features)
    num_groups = spec.num_groups(in_features)
    shapes = {
        "qzeros": (num_groups, packed_length(out_features, spec.bits)),
        "scales": (num_groups, out_features),
    }
    for field, shape in shapes.items():
        if tensors[field].shape != shape:
            raise CheckpointError(
                f"{name}.{field}",
                f"expected {list(shape)} for {spec.bits} bits in groups of {spec.group_size},"
                f" found {list(tensors[field].shape)}",
            )
    _check_group_index(tensors.get("g_idx"), spec.group_length(in_features), in_features, name)
    zeros_GN = (unpack(qzeros, spec.bits) + 1) & spec.max_code
    if spec.symmetric and (zeros_GN == spec.symmetric_zero + 1).all():
        raise CheckpointError(
            f"{name}.qzeros",
            f"stores the zero point {spec.symmetric_zero} itself (GPTQ v2), but the config says v1",
            'set "checkpoint_format": "gptq_v2" or repack',
        )
    packed = PackedWeight(
        words_NW=qweight.t().contiguous(),
        scales_NG=scales_GN.t().contiguous(),
        zeros_NG=zeros_GN.t().contiguous(),
        spec=spec,
        in_features=in_features,
    )
    packed.check(name)
    return packed


def _check_group_index(g_idx: torch.Tensor | None, group: int, in_features: int, name: str) -> None:
    if g_idx is None:
        return
    trivial = torch.arange(in_features, dtype=torch.int32, device=g_idx.device) // group
    if g_idx.shape != trivial.shape or not torch.equal(g_idx.to(torch.int32), trivial):
        raise CheckpointError(
            f"{name}.g_idx",
            "inputs are not grouped in order (act-order), which is not supported",
            "quantize again with desc_act off",
        )
