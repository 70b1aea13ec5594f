"""Tensors of AMD's Quark -> weights, on the local names of one linear. Read only.

float8 and int8 weights have the names and bytes of compressed-tensors. A byte holds two fp4
numbers, and 32 inputs share an exponent byte. 4-bit integers are packed as in AWQ; int4 is signed.
Legend: N outputs, K inputs, G groups.
"""

import torch

from formats.codecs import awq, compressed_tensors
from formats.errors import tensor_error
from formats.in_memory.fp4 import Fp4Weight, is_fp4
from formats.in_memory.packed import PackedWeight
from formats.in_memory.weights import Weight
from formats.numerics.bits import pack, unpack
from formats.scheme import Scheme

FIELDS = ("weight", "weight_scale", "weight_zero_point", *compressed_tensors.INPUT_FIELDS)
_SIGNS = -0x77777778  # highest bit of each nibble, as int32


def decode(
    tensors: dict[str, torch.Tensor], scheme: Scheme, name: str = "weight", *, reordered: bool
) -> Weight:
    """Decode one linear's tensors. Raises CheckpointError, with `name`, on a mismatch.

    `reordered`: 4-bit integers of a word are in AWQ's order, not in the order of the outputs.
    """
    for field in ("weight", "weight_scale"):
        if field not in tensors:
            raise tensor_error(f"{name}.{field}", "is missing")
    if is_fp4(scheme.weight):
        weight = Fp4Weight(
            bytes_NB=tensors["weight"],
            scales_NG=tensors["weight_scale"],
            global_scale=None,
            spec=scheme.weight,
        )
        weight.check(name)
        return weight
    if scheme.weight.type == "int" and scheme.weight.bits == 4:
        return _decode_int4(tensors, scheme, name, reordered)
    # zeros of symmetric integers are all 0
    zeros = tensors.get("weight_zero_point")
    if zeros is not None and scheme.weight.symmetric and bool(zeros.any()):
        raise tensor_error(
            f"{name}.weight_zero_point", f"expected only zeros for {scheme}, found other numbers"
        )
    kept = {field: t for field, t in tensors.items() if field != "weight_zero_point"}
    return compressed_tensors.decode(kept, scheme, name)


def _decode_int4(
    tensors: dict[str, torch.Tensor], scheme: Scheme, name: str, reordered: bool
) -> PackedWeight:
    """Decode int32 words [K, N / 8], scales [G, N], zeros [G, N / 8]."""
    words = {
        field: tensors[own]
        for field, own in (("qweight", "weight"), ("qzeros", "weight_zero_point"))
        if own in tensors
    }
    for field, tensor in words.items():
        if tensor.dtype != torch.int32 or tensor.ndim != 2:
            raise tensor_error(
                f"{name} {field}",
                f"expected a 2-d int32 tensor, found {tensor.dtype} {list(tensor.shape)}",
            )
    if scheme.weight.symmetric:  # two's complement to codes with a zero point of 8
        words = {field: tensor ^ _SIGNS for field, tensor in words.items()}
    if not reordered:
        words = {field: _in_awq_order(tensor) for field, tensor in words.items()}
    return awq.decode({**words, "scales": tensors["weight_scale"]}, scheme.weight, name)


def _in_awq_order(words: torch.Tensor) -> torch.Tensor:
    lanes = unpack(words, awq.BITS).unflatten(1, (-1, awq.LANES))
    return pack(lanes[..., list(awq.LANE_ORDER)].flatten(1), awq.BITS)
