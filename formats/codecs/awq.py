"""AWQ "GEMM" tensors <-> PackedWeight, on the local names of one linear. See formats/README.md.

Only this module knows the interleaved order of the lanes in a word. Legend: N outputs, K inputs, G
groups.
"""

import torch

from formats.errors import tensor_error, unsupported_error
from formats.in_memory.packed import PackedWeight
from formats.numerics.bits import pack, unpack
from formats.scheme import QuantSpec

BITS = 4
LANES = 8  # codes per word
# Nibble i of word j holds output 8 j + LANE_ORDER[i].
LANE_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
NIBBLE_OF_LANE = (0, 4, 1, 5, 2, 6, 3, 7)  # output 8 j + i is in nibble NIBBLE_OF_LANE[i]
REQUIRED = ("qweight", "scales")


def encode(packed: PackedWeight, name: str = "weight") -> dict[str, torch.Tensor]:
    """Return the AWQ tensors of one linear."""
    return {
        "qweight": _from_rows(packed.words_NW),
        "qzeros": _pack(packed.zeros_NG.t()),
        "scales": packed.scales_NG.t().contiguous(),
    }


def decode(tensors: dict[str, torch.Tensor], spec: QuantSpec, name: str = "weight") -> PackedWeight:
    """Decode one linear's AWQ tensors; symmetric ones may lack qzeros. Raises CheckpointError."""
    missing = [field for field in REQUIRED if field not in tensors]
    if not spec.symmetric and "qzeros" not in tensors:
        missing.append("qzeros")
    if missing:
        raise tensor_error(name, f"tensors missing: {', '.join(missing)}")
    if spec.bits != BITS:
        raise unsupported_error(name, f"expected 4 bits in AWQ, found {spec.bits}")
    qweight, scales_GN = tensors["qweight"], tensors["scales"]
    for field in ("qweight", "qzeros"):
        tensor = tensors.get(field)
        if tensor is not None and (tensor.dtype != torch.int32 or tensor.ndim != 2):
            raise tensor_error(
                f"{name}.{field}",
                f"expected a 2-d int32 tensor, found {tensor.dtype} {list(tensor.shape)}",
            )
    in_features, out_features = qweight.shape[0], qweight.shape[1] * LANES
    spec.check_shape(name, out_features, in_features)
    num_groups = spec.num_groups(in_features)
    shapes = {"scales": (num_groups, out_features), "qzeros": (num_groups, qweight.shape[1])}
    for field, shape in shapes.items():
        if field in tensors and tensors[field].shape != shape:
            raise tensor_error(
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
        words_NW=_to_rows(qweight),
        scales_NG=scales_GN.t().contiguous(),
        zeros_NG=zeros_NG,
        spec=spec,
        in_features=in_features,
    )
    packed.check(name)
    return packed


def is_symmetric(qzeros: torch.Tensor) -> bool:
    """Return True if every zero point is 8, the middle. Compares words without unpacking."""
    return bool((qzeros == -2004318072).all())  # 0x88888888


def _from_rows(words_NW: torch.Tensor) -> torch.Tensor:
    """Turn words of eight inputs [N, W] into interleaved words of eight outputs [8 W, N / 8]."""
    lanes = words_NW.unflatten(0, (-1, LANES))
    by_input = _transpose_nibbles([lanes[:, lane] for lane in LANE_ORDER])
    return torch.stack([word_JW.t() for word_JW in by_input], 1).flatten(0, 1)


def _to_rows(words_KJ: torch.Tensor) -> torch.Tensor:
    """Undo `_from_rows`."""
    inputs = words_KJ.unflatten(0, (-1, LANES))
    by_nibble = _transpose_nibbles([inputs[:, i] for i in range(LANES)])
    return torch.stack([by_nibble[i].t() for i in NIBBLE_OF_LANE], 1).flatten(0, 1)


def _transpose_nibbles(words: list[torch.Tensor]) -> list[torch.Tensor]:
    """Transpose blocks of 8 x 8 nibbles in three rounds of swaps (Hacker's Delight).

    Nibble c of word r becomes nibble r of word c. With it, converting four layers of an 8B model
    from GPTQ takes 18 s on two cores; unpacking the codes to bytes would take 38 s.
    """
    words = [word.clone() for word in words]
    for distance, mask in ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F)):
        shift = BITS * distance
        for low in (r for r in range(LANES) if not r & distance):
            high = low + distance
            # >> is arithmetic: the mask drops the copies of the sign bit
            swapped = (words[low] >> shift).bitwise_xor_(words[high]).bitwise_and_(mask)
            words[high].bitwise_xor_(swapped)
            words[low].bitwise_xor_(swapped << shift)
    return words


def _pack(codes_XN: torch.Tensor) -> torch.Tensor:
    lanes = codes_XN.unflatten(1, (-1, LANES))[..., list(LANE_ORDER)]
    return pack(lanes.flatten(1), BITS)


def _unpack(words: torch.Tensor) -> torch.Tensor:
    lanes = unpack(words, BITS).unflatten(1, (-1, LANES))
    return lanes[..., list(NIBBLE_OF_LANE)].flatten(1)
