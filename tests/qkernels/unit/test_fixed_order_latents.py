"""Latent attention in fixed order on a CPU, and the choices of its GPU form."""

import dataclasses

import pytest
import torch

from qkernels import ops
from qkernels.latent.fixed_order.config import (
    MAX_PARTIAL_BYTES,
    SEGMENT_KEYS,
    rows_of_tile,
    segment_boundaries,
    segment_config,
    segment_splits,
)
from tests.qkernels.latent_case import latent_case

SIZES = {"H": 5, "L": 32, "rope": 16, "B": 8}


@pytest.mark.parametrize("codes", [None, torch.int8])
def test_chunk_rows_equal_decode_rows(codes):
    case = latent_case((30, 3), (47, 9), **SIZES, dtype=torch.float32, codes=codes)
    settings = {"latent_width": 32, "scale": case.scale, "kernel": "fixed_order"}
    want = ops.latent_attention(case.q_THE, case.cache, case.step, **settings)
    torch.testing.assert_close(want.double(), case.exact(), atol=1e-5, rtol=1e-5)
    for row in range(30):
        alone = dataclasses.replace(
            case.step,
            block_tables_RX=case.step.block_tables_RX[:1],
            query_starts_R1=torch.tensor([0, 1], dtype=torch.int32),
            context_lengths_R=torch.tensor([18 + row], dtype=torch.int32),
            max_query_len=1,
        )
        got = ops.latent_attention(case.q_THE[row : row + 1], case.cache, alone, **settings)
        assert torch.equal(got[0], want[row]), row


def test_heads_are_multiplied_per_row():
    x, weight = torch.randn(19, 6, 40)[..., :24], torch.randn(6, 24, 36)
    out = torch.full((19, 6, 50), 7.0)
    want = ops.fixed_order_heads(x, weight, out[..., :36])
    torch.testing.assert_close(want, torch.einsum("thk,hkn->thn", x, weight))
    assert (out[..., 36:] == 7).all() and torch.equal(out[..., :36], want)
    for t in range(19):
        assert torch.equal(ops.fixed_order_heads(x[t : t + 1], weight)[0], want[t])


@pytest.mark.parametrize("heads", [5, 16, 20, 128])
def test_tile_depends_only_on_model_and_gpu(heads):
    for shared in (100_000, 232_448):
        config = segment_config(heads=heads, element_size=2, shared_bytes=shared)
        assert config.block_heads * config.block_q == 32 and SEGMENT_KEYS % config.keys == 0


@pytest.mark.parametrize("max_tokens, longest", [(8, 4096), (2048, 512), (2048, 8192)])
def test_warm_up_covers_every_kernel_and_fits(max_tokens, longest):
    steps = list(
        segment_boundaries(max_requests=64, max_tokens=max_tokens, max_context_len=longest)
    )
    tiles = set()
    for requests, count, keys in steps:
        assert count <= keys <= longest and requests * count <= max_tokens
        tiles.add(rows_of_tile(requests * count))
    assert tiles >= {rows_of_tile(T) for T in range(1, min(max_tokens, longest) + 1)}
    assert (1, 1, longest) in steps


def test_splits_fill_the_gpu_and_bound_the_partial_sums():
    assert segment_splits(1, 32, 2**20, 132) == 32
    assert segment_splits(128, 32, 2**20, 132) == 2
    assert segment_splits(10_000, 32, 2**20, 132) == 1
    assert segment_splits(1, 32, MAX_PARTIAL_BYTES + 1, 132) == 1
