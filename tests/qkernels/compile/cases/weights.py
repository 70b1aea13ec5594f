"""Weights of each scheme, as a card gets them."""

import functools
import math

import torch

from formats.gguf.block_types import BY_NAME
from formats.in_memory.fp4 import SCALE_DTYPES, Fp4Weight
from formats.in_memory.fp8 import Fp8Weight
from formats.in_memory.k_weight import KWeight
from formats.in_memory.packed import PackedWeight
from formats.in_memory.weights import with_activation
from formats.scheme import BLOCK_TYPES, FP4_TYPES, Scheme, block_scheme
from qkernels import ops
from qkernels.linear.prepared import PreparedWeight
from tests.qkernels.compile.cases.case import FP8, FP16


def weight_of(scheme: Scheme, N: int, K: int) -> PackedWeight | Fp8Weight | Fp4Weight | KWeight:
    """A weight of zeros: only its shapes and types count."""
    spec, activation = scheme.weight, scheme.activation
    if spec.type in FP4_TYPES:
        scales = torch.zeros(N, spec.num_groups(K), dtype=torch.uint8)
        return Fp4Weight(
            bytes_NB=torch.zeros(N, K // 2, dtype=torch.uint8),
            scales_NG=scales.view(SCALE_DTYPES[spec.type]),
            global_scale=torch.ones(()) if spec.type == "nvfp4" else None,
            spec=spec,
        )
    if spec.type in BLOCK_TYPES:
        row_bytes = BY_NAME[spec.type.upper()].row_bytes(K)
        return KWeight(bytes_NX=torch.zeros(N, row_bytes, dtype=torch.uint8), spec=spec)
    if spec.type == "float":
        codes = torch.zeros(N, K, dtype=torch.uint8).view(FP8)
        block = spec.group_size if spec.rows > 1 else None
        rows, columns = (N, 1) if block is None else (math.ceil(N / spec.rows), K // block)
        weight = Fp8Weight(codes_NK=codes, scales_RC=torch.ones(rows, columns), spec=spec)
    else:
        G = spec.num_groups(K)
        scales_NG = torch.ones(N, G, dtype=FP16)
        if G > 1:
            scales_NG[0, 0] = 17  # no multiples of one number (formats/numerics/multiples.py)
        weight = PackedWeight(
            words_NW=torch.zeros(N, K * spec.bits // 32, dtype=torch.int32),
            scales_NG=scales_NG,
            zeros_NG=torch.full((N, G), spec.symmetric_zero, dtype=torch.uint8),
            spec=spec,
            in_features=K,
        )
    return with_activation(weight, scheme, None) if activation is not None else weight


def scheme_of(name: str) -> Scheme:
    """Return a scheme by its name, or that of blocks of a GGUF file."""
    return block_scheme(name) if name in BLOCK_TYPES else Scheme.parse(name)


@functools.lru_cache(maxsize=4)
def prepared(
    scheme: str, shape: tuple[int, int], dtype: torch.dtype, kernel: str | None = None
) -> PreparedWeight:
    return ops.prepare_weight(weight_of(scheme_of(scheme), *shape), dtype, kernel=kernel)
