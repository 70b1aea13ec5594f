"""Reader of MXFP4 as gpt-oss stores its experts.

A block of 32 inputs has one scale byte s, 2^(s - 127), and 16 bytes of two numbers each, encoded as
in Fp4Weight (fp4.py). Legend: N outputs, G = K / 32 groups of inputs.
"""

import math
from collections.abc import Mapping

import torch

from formats.errors import CheckpointError, tensor_error
from formats.files.tensor_entry import TensorEntry
from formats.in_memory.fp4 import Fp4Weight
from formats.scheme import FP4_TYPES, QuantSpec

METHOD = "mxfp4"  # in quant_method
GROUP = FP4_TYPES["mxfp4"]
SPEC = QuantSpec(bits=4, symmetric=True, group_size=GROUP, type="mxfp4")


def decode(blocks_NGB: torch.Tensor, scales_NG: torch.Tensor, name: str = "weight") -> Fp4Weight:
    """Return uint8 blocks [N, G, 16] and scales [N, G] as a weight. Raises CheckpointError."""
    N, G = scales_NG.shape
    if blocks_NGB.shape != (N, G, GROUP // 2) or blocks_NGB.dtype != torch.uint8:
        raise tensor_error(
            name,
            f"expected uint8 blocks [{N}, {G}, {GROUP // 2}],"
            f" found {blocks_NGB.dtype} {list(blocks_NGB.shape)}",
        )
    if (scales_NG == 255).any():
        raise CheckpointError(f"{name} scales", "contain NaN", "quantize again")
    return Fp4Weight(
        bytes_NB=blocks_NGB.flatten(1), scales_NG=scales_NG, global_scale=None, spec=SPEC
    )


def size_of_experts(entries: Mapping[str, TensorEntry]) -> tuple[int, int]:
    """Return the bytes and the number of weights of a model's experts in MXFP4."""
    blocks = {n.removesuffix("_blocks"): e for n, e in entries.items() if n.endswith("_blocks")}
    pairs = [(e, entries[f"{n}_scales"]) for n, e in blocks.items() if f"{n}_scales" in entries]
    num_bytes = sum(each.num_bytes for pair in pairs for each in pair)
    return num_bytes, sum(2 * math.prod(entry.shape) for entry, _ in pairs)
