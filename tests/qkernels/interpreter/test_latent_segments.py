"""Latent attention in segments of keys: near float64, and one order for rows, splits and chunks."""

import dataclasses

import pytest
import torch

from qkernels.attention.cache import AttentionStep
from qkernels.latent.fixed_order import triton_heads, triton_segments
from qkernels.latent.fixed_order.config import segment_config
from tests.qkernels.latent_case import latent_case

SIZES = {"H": 16, "L": 32, "rope": 16, "B": 16}


def attend(case, q=None, step=None, splits=None):
    return triton_segments.latent_attention(
        case.q_THE if q is None else q,
        case.cache,
        step or case.step,
        latent_width=case.latent,
        scale=case.scale,
        splits=splits,
        config=dataclasses.replace(
            segment_config(
                heads=SIZES["H"], element_size=case.q_THE.element_size(), shared_bytes=232_448
            ),
        ),
    )


@pytest.mark.parametrize("codes", [None, torch.int8, torch.float8_e4m3fn])
def test_rows_attend_to_their_entries(codes, half, device, assert_close, tolerance, poison):
    """Requests shorter than a segment, at its end and beyond; one without rows; any splits."""
    counts, lengths = (1, 3, 0, 2, 1), (33, 257, 4, 2, 600)
    case = latent_case(counts, lengths, **SIZES, dtype=half, codes=codes, device=device)
    got = attend(case, splits=1)
    assert_close("out", case.exact(), got, tolerance(half))
    for splits in (2, 3):
        assert torch.equal(attend(case, splits=splits), got), splits


def test_row_has_same_bits_in_any_chunk(half, device, poison):
    case = latent_case((6,), (262,), **SIZES, dtype=half, device=device)
    want = attend(case, splits=1)
    # at the same place of a tile: the interpreter's products differ by it, a GPU's do not
    for first, count in ((0, 2), (2, 2), (4, 1), (0, 4)):
        step = AttentionStep(
            block_tables_RX=case.step.block_tables_RX,
            query_starts_R1=torch.tensor([0, count], dtype=torch.int32, device=device),
            context_lengths_R=torch.tensor([256 + first + count], dtype=torch.int32, device=device),
            max_query_len=count,
            max_context_len=262,
        )
        rows = slice(first, first + count)
        assert torch.equal(attend(case, case.q_THE[rows], step), want[rows]), (first, count)


@pytest.mark.parametrize("K, N", [(40, 72), (128, 64)])
def test_per_head_products(K, N, half, device, assert_close, tolerance):
    generator = torch.Generator().manual_seed(K)
    x = torch.randn(21, 3, K + 9, generator=generator).to(device, half)[..., :K]
    weight = (torch.randn(3, K, N, generator=generator) / K**0.5).to(device, half)
    out = torch.full((21, 3, N + 7), 3.0, dtype=half, device=device)
    triton_heads.multiply(x, weight, out[..., :N])
    want = torch.einsum("thk,hkn->thn", x.double(), weight.double())
    assert_close("out", want, out[..., :N], tolerance(half))
    assert (out[..., N:] == 3.0).all()
