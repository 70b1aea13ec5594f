"""AWQ "GEMM" tensors <-> PackedWeight, on the local names of one linear. See formats/README.md.

The interleaved order of the lanes of a word exists here and nowhere else. Legend: N outputs, K
inputs, G groups.
"""

import torch

from formats.bits import pack, unpack
from formats.errors import CheckpointError
from formats.packed import PackedWeight
from formats.scheme import QuantSpec

BITS = 4
LANES = 8  # codes of a word
# Nibble i of word j holds output 8 j + LANE_ORDER[i].
LANE_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
NIBBLE_OF_LANE = (0, 4, 1, 5, 2, 6, 3, 7)
REQUIRED = ("qweight", "scales")


def encode(packed: PackedWeight, name: str = "weight") -> dict[str, torch.Tensor]:
    """The AWQ tensors of one linear."""
    return {
        "qweight": _pack(packed.codes().t()),
        "qzeros": _pack(packed.zeros_NG.t()),
        "scales": packed.scales_NG.t().contiguous(),
    }


def decode(tensors: dict[str, torch.Tensor], spec: QuantSpec, name: str = "weight") -> PackedWeight:
    """Read one linear's AWQ tensors; symmetric ones may lack qzeros. Raises CheckpointError."""
    missing = [field for field in REQUIRED if field not in tensors]
    if not spec.symmetric and "qzeros" not in tensors:
        missing.append("qzeros")
    if missing:
        raise CheckpointError(name, f"tensors missing: {', '.join(missing)}")
    if spec.bits != BITS:
        raise CheckpointError(name, f"AWQ has 4 bits, found {spec.bits}")
    qweight, scales_GN = tensors["qweight"], tensors["scales"]
    for field in ("qweight", "qzeros"):
        tensor = tensors.get(field)
        if tensor is not None and (tensor.dtype != torch.int32 or tensor.ndim != 2):
            raise CheckpointError(
                f"{name}.{field}",
                f"expected a 2-d int32 tensor, found {tensor.dtype} {list(tensor.shape)}",
            )
    in_features, out_features = qweight.shape[0], qweight.shape[1] * LANES
    spec.check_shape(name, out_features, in_features)
    num_groups = spec.num_groups(in_features)
    shapes = {"scales": (num_groups, out_features), "qzeros": (num_groups, qweight.shape[1])}
    for field, shape in shapes.items():
        if field in tensors and tensors[field].shape != shape:
            raise CheckpointError(
                f"{name}.{field}",
                f"expected {list(shape)} in groups of {spec.group_size},"
                f" found {list(tensors[field].shape)}",
            )
    if "qzeros" in tensors:
        zeros_NG = _unpack(tensors["qzeros"]).t().contiguous()
    else:
        zeros_NG = torch.full(
            (out_features, num_groups), spec.symmetric_zero, dtype=torch.uint8
        ).to(qweight.device)
    packed = PackedWeight(
        words_NW=pack(_unpack(qweight).t(), BITS),
        scales_NG=scales_GN.t().contiguous(),
        zeros_NG=zeros_NG,
        spec=spec,
        in_features=in_features,
    )
    packed.check(name)
    return packed


def is_symmetric(qzeros: torch.Tensor) -> bool:
    """Is every zero point the middle, 8? All nibbles alike need no unpacking."""
    return bool((qzeros == -2004318072).all())  # 0x88888888


def _pack(codes_XN: torch.Tensor) -> torch.Tensor:
    lanes = codes_XN.unflatten(1, (-1, LANES))[..., list(LANE_ORDER)]
    return pack(lanes.flatten(1), BITS)


def _unpack(words: torch.Tensor) -> torch.Tensor:
    lanes = unpack(words, BITS).unflatten(1, (-1, LANES))
    return lanes[..., list(NIBBLE_OF_LANE)].flatten(1)
