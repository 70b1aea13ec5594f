"""Benchmarks of products with weights in GGUF blocks and in 4-bit floats.

Baselines of the same shape: `sym_g128` and `sym_g32`, symmetric codes with as many bits; `triton`,
the same weight in the portable kernel; `cublas`, the dequantized weight; `copy`, a copy that moves
as many bytes as the product reads and writes, a lower bound for any GPU.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn import functional

from formats.in_memory.fp4 import Fp4Weight
from formats.in_memory.k_weight import KWeight
from formats.scheme import BLOCK_TYPES, FP4_TYPES, Scheme, block_scheme
from qkernels import ops
from qkernels.bench.linear import LINEAR_SHAPES, random_weight
from qkernels.bench.measure import Baselines, BenchedOp, Call, Case, copies_needed, read_shape
from qkernels.wna16.layout import kernel_bits

BLOCKS_M = (1, 4, 16, 64)
STD = 0.02  # standard deviation of the weights


def random_blocks(kind: str, N: int, K: int, seed: int) -> KWeight | Fp4Weight:
    """Return random weights in GGUF blocks or 4-bit floats, on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    if kind not in FP4_TYPES:
        return KWeight.random((N, K), block_scheme(kind).weight, STD, generator)
    weight_NK = torch.randn(N, K, device="cuda", generator=generator) * STD
    return Fp4Weight.from_float(weight_NK, Scheme.parse(f"w4a16-{kind}").weight)


def _blocks(kind: str, shape: str, ms: tuple[int, ...], baselines: Baselines) -> Iterator[Case]:
    N, K = read_shape(LINEAR_SHAPES, shape)
    bits = 4 if kind in FP4_TYPES else kernel_bits(block_scheme(kind).weight.bits)
    seeds = range(copies_needed(N * K * bits // 8))
    stored = [random_blocks(kind, N, K, seed) for seed in seeds]
    weight_NK = stored[0].dequantize(torch.bfloat16).double()
    weights = [ops.prepare_weight(each, torch.bfloat16) for each in stored]
    rivals = {}
    if "triton" in baselines:
        portable = partial(ops.prepare_weight, dtype=torch.bfloat16, kernel="triton")
        rivals["triton"] = [portable(each) for each in stored]
    for group in (128, 32):
        if f"sym_g{group}" in baselines:
            made = [random_weight(N, K, i, bits, group) for i in range(len(stored))]
            rivals[f"sym_g{group}"] = [ops.prepare_weight(w, torch.bfloat16) for w in made]
    dense = ()
    if "cublas" in baselines:
        dense = [each.dequantize(torch.bfloat16) for each in stored[: copies_needed(2 * N * K)]]
    for m in ms:
        x = torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
        num_bytes = weights[0].nbytes + 2 * m * (N + K)
        others: dict[str, list[Call]] = {
            name: [lambda x=x, w=w: ops.linear(x, w) for w in made] for name, made in rivals.items()
        }
        if dense:
            others["cublas"] = [lambda x=x, w=w: functional.linear(x, w) for w in dense]
        if "copy" in baselines:
            others["copy"] = _copies(num_bytes)
        yield Case(
            op=kind,
            shape=shape,
            m=m,
            num_bytes=num_bytes,
            operations=2 * m * N * K,
            calls=[lambda x=x, w=w: ops.linear(x, w) for w in weights],
            want=x.double() @ weight_NK.t(),
            allowed_error=5e-3,
            baselines=others,
        )


def _copies(num_bytes: int) -> list[Call]:
    """Return copies that together read and write `num_bytes`, of buffers outside of the L2."""
    pairs = [
        [torch.zeros(num_bytes // 2, dtype=torch.uint8, device="cuda") for _ in range(2)]
        for _ in range(copies_needed(num_bytes))
    ]
    return [lambda to=to, of=of: to.copy_(of) for to, of in pairs]


OPS: dict[str, BenchedOp] = {
    kind: BenchedOp(
        cases=partial(_blocks, kind),
        shapes=LINEAR_SHAPES,
        default_m=dict.fromkeys(LINEAR_SHAPES, BLOCKS_M),
        baselines=("sym_g128", "sym_g32", "triton", "cublas", "copy"),
        dims=2,
    )
    for kind in (*BLOCK_TYPES, *FP4_TYPES)
}
