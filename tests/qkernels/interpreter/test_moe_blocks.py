"""Experts in GGUF blocks and in several widths of codes, in the portable kernels.

Interpreted on a CPU, compiled on a GPU, compared with plain torch.
"""

import dataclasses

import pytest
import torch

from formats.in_memory.k_weight import KWeight
from formats.in_memory.slices import take_outputs
from formats.scheme import BLOCK_TYPES, Scheme, block_scheme
from qkernels import ops
from qkernels.errors import KernelError
from qkernels.moe.experts import ExpertWeights
from qkernels.moe.routing import SILU
from qkernels.operands.split_k import reduced
from tests.qkernels.moe_case import COARSER, make_experts, run


@pytest.mark.parametrize(
    ("gate_up", "down", "stored"), [((2, 3, 4), (4, 3, 2), 4), ((3, 3, 8), (4, 4, 4), 8)]
)
def test_mixed_bit_experts_are_stacked(device, half, poison, assert_close, gate_up, down, stored):
    """A mixed-bits recipe gives experts and their products different numbers of bits."""
    made = {
        bits: make_experts(Scheme.parse(f"w{bits}a16-sym-g32"), 64, 64, 3, 2, SILU, False, half)
        for bits in {*gate_up, *down}
    }
    weights = dataclasses.replace(
        made[3],
        gate_up=[made[bits].gate_up[e] for e, bits in enumerate(gate_up)],
        down=[made[bits].down[e] for e, bits in enumerate(down)],
    )
    prepared = ops.prepare_experts(weights, half, device, kernel="triton")
    assert prepared.problem.spec.bits == prepared.gate_up.spec.bits == stored
    got, want = run(weights, 5, half, device)
    assert_close("several widths", want, reduced(got), 4e-3 * COARSER[half])


def random_blocks(gate_up, down, hidden, inner, glu):
    """Three experts in blocks of a GGUF file."""

    def matrices(kind, N, K):
        spec = block_scheme(kind).weight
        seeds = (torch.Generator().manual_seed(N + e) for e in range(3))
        return [KWeight.random((N, K), spec, K**-0.5, seed) for seed in seeds]

    return ExpertWeights(
        top_k=2,
        gate_up=matrices(gate_up, glu.outputs(inner), hidden),
        down=matrices(down, hidden, inner),
        glu=glu,
    )


@pytest.mark.parametrize("M", [1, 5, 33])
@pytest.mark.parametrize(
    ("gate_up", "down"),
    [("q4_k", "q6_k"), *((kind, kind) for kind in BLOCK_TYPES)],
)
def test_gguf_block_experts(device, half, poison, assert_close, gate_up, down, M):
    """Q4_K_M has Q6_K in half of the layers' down."""
    weights = random_blocks(gate_up, down, 256, 256, SILU)
    got, want = run(weights, M, half, device)
    assert_close(gate_up, want, reduced(got), 4e-3 * COARSER[half])


def test_gguf_blocks_mixed_with_other_types(device, half, poison, assert_close):
    """llama.cpp writes Q8_0 or Q5_0 where 256 does not divide the inner size."""
    weights = random_blocks("q4_k", "q4_1", 256, 96, SILU)
    scheme = Scheme.parse("w8a16-sym-g32")
    down = make_experts(scheme, 256, 96, 3, 2, SILU, False, half).down
    got, want = run(dataclasses.replace(weights, down=down), 3, half, device)
    assert_close("Q4_K and Q8_0", want, reduced(got), 4e-3 * COARSER[half])


def test_sharded_gguf_blocks(device, half, poison, assert_close):
    """A tensor-parallel shard of `down` may begin and end inside a block."""
    weights = random_blocks("q4_k", "q6_k", 256, 512, SILU)
    down = [matrix.take_inputs(96, 480) for matrix in weights.down]
    gate_up = [take_outputs(each, [(96, 480), (608, 992)]) for each in weights.gate_up]
    weights = dataclasses.replace(weights, gate_up=gate_up, down=down)
    got, want = run(weights, 3, half, device)
    assert_close("shards", want, reduced(got), 4e-3 * COARSER[half])


def test_different_weight_kinds_are_not_stacked(device, half):
    made = [
        make_experts(scheme and Scheme.parse(scheme), 64, 64, 3, 2, SILU, False, half)
        for scheme in ("w4a16-sym-g32", None)
    ]
    weights = dataclasses.replace(made[0], down=made[1].down)
    with pytest.raises(KernelError, match="its two products differ in kind"):
        ops.prepare_experts(weights, half, device, kernel="triton")
