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


def test_padding_tokens_are_written_nowhere(device):
    pages = torch.zeros(3, 4, 24, device=device)
    entries_TE = torch.arange(1, 5, device=device)[:, None].expand(4, 24).float()
    slots_T = torch.tensor([5, -1, 11, 0], device=device)
    triton_latent.write_latents_(entries_TE, PagedLatents(pages=pages), slots_T)
    assert pages.flatten(0, 1)[:, 0].tolist() == [4, *[0] * 4, 1, *[0] * 5, 3]
    assert torch.equal(pages[..., :1].expand_as(pages), pages)
