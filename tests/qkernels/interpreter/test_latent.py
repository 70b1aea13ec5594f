"""Latent attention in Triton against float64: in the interpreter on a CPU, compiled on a GPU."""

from dataclasses import replace

import pytest
import torch

from qkernels import ops
from qkernels.latent import triton_latent
from qkernels.latent.cache import PagedLatents
from qkernels.latent.config import default_latent_config
from tests.qkernels.latent_case import latent_case

# counts and lengths: decode rows; chunks that begin and go on; both, and a request without rows
STEPS = {
    "decode": ((1, 1, 1), (70, 1, 17)),
    "chunks": ((5, 9), (5, 40)),
    "mixed": ((1, 6, 0, 1), (33, 20, 4, 2)),
}


@pytest.mark.parametrize("split", [1, 4])
@pytest.mark.parametrize("H, L, rope, B", [(16, 64, 16, 16), (5, 48, 24, 8), (20, 32, 16, 32)])
@pytest.mark.parametrize("name", STEPS)
def test_rows_see_their_entries(
    name, H, L, rope, B, split, dtype, device, assert_close, tolerance, poison
):
    counts, lengths = STEPS[name]
    case = latent_case(counts, lengths, H=H, L=L, rope=rope, B=B, dtype=dtype, device=device)
    config = default_latent_config(
        num_requests=len(counts),
        heads=H,
        element_size=dtype.itemsize,
        max_query_len=max(counts),
        max_context_len=max(lengths),
        sm_count=100,
    )
    got = triton_latent.latent_attention(
        case.q_THE,
        case.cache,
        case.step,
        latent_width=L,
        scale=case.scale,
        config=replace(config, split=split),
    )
    assert_close("out", case.exact(), got, tolerance(dtype))


def test_padding_rows_after_the_last_request_change_nothing(device, assert_close, tolerance):
    """As in a CUDA graph, whose step has more rows than the requests."""
    case = latent_case(
        (1, 1), (40, 9), H=16, L=32, rope=16, B=16, dtype=torch.float32, device=device
    )
    q_THE = torch.cat([case.q_THE, torch.full_like(case.q_THE, float("nan"))])
    got = ops.latent_attention(
        q_THE, case.cache, case.step, latent_width=32, scale=case.scale, kernel="triton"
    )
    assert_close("out", case.exact(), got[:2], tolerance(torch.float32))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("H, L, rope", [(3, 48, 16), (5, 64, 24)])
def test_entries_and_queries_are_the_references(H, L, rope, interleaved, dtype, device, poison):
    """Slot -1 is padding; queries and latents are slices of what a projection made."""
    generator = torch.Generator().manual_seed(L)
    made = torch.randn(4, 7 + L + rope, generator=generator).to(device, dtype)[:, 7:]
    q_THR = torch.randn(4, H, 5 + rope, generator=generator).to(device, dtype)[..., 5:]
    norm = (1 + torch.randn(L, generator=generator) / 5).to(device, dtype)
    angles = torch.randn(30, rope // 2, generator=generator)
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1).to(device)
    positions, slots = torch.tensor([3, 29, 0, 7]), torch.tensor([5, -1, 11, 0])
    found = []
    for kernel in ("triton", "reference"):
        pages = torch.zeros(3, 4, L + rope, device=device, dtype=dtype)
        q_THE = ops.rope_write_latents_(
            q_THR,
            made,
            norm,
            cos_sin,
            positions.to(device),
            PagedLatents(pages=pages),
            slots.to(device),
            eps=1e-6,
            interleaved=interleaved,
            kernel=kernel,
        )
        found.append((q_THE[..., L:], pages))
    written = found[0][1].flatten(0, 1).any(1).nonzero().flatten().tolist()
    assert written == [0, 5, 11]
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(
            got, want, rtol=2e-3 if dtype != torch.float32 else 1e-5, atol=1e-5
        )
