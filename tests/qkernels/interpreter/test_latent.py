"""Latent attention in Triton against float64: in the interpreter on a CPU, compiled on a GPU."""

from dataclasses import replace

import pytest
import torch

from qkernels import ops
from qkernels.attention.cache import AttentionStep
from qkernels.latent import triton_latent
from qkernels.latent.cache import PagedLatents
from qkernels.latent.config import default_latent_config
from qkernels.latent.expanded import ExpandedChunks, expanded_attention
from qkernels.latent.fixed_order import triton_segments
from tests.qkernels.latent_case import latent_case

# counts and lengths: decode rows; chunks that begin and go on; both, and a request without rows
STEPS = {
    "decode": ((1, 1, 1), (70, 1, 17)),
    "chunks": ((5, 9), (5, 40)),
    "mixed": ((1, 6, 0, 1), (33, 20, 4, 2)),
}


@pytest.mark.parametrize("codes", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("shared", [100_000, 232_448])
@pytest.mark.parametrize("split", [1, 4])
@pytest.mark.parametrize("H, L, rope, B", [(16, 64, 16, 16), (5, 48, 32, 8), (20, 32, 16, 32)])
@pytest.mark.parametrize("name", STEPS)
def test_rows_attend_to_their_entries(
    name, H, L, rope, B, split, codes, shared, dtype, device, assert_close, tolerance, poison
):
    counts, lengths = STEPS[name]
    sizes = {"H": H, "L": L, "rope": rope, "B": B}
    case = latent_case(counts, lengths, **sizes, dtype=dtype, codes=codes, device=device)
    config = default_latent_config(
        num_requests=len(counts),
        heads=H,
        element_size=dtype.itemsize,
        max_query_len=max(counts),
        max_context_len=max(lengths),
        sm_count=100,
        shared_bytes=shared,
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


@pytest.mark.parametrize("codes", [None, torch.int8])
def test_wide_entries(codes, half, device, assert_close, tolerance, poison):
    """As in dots3-note's layers with windows; the default config is one for wide entries."""
    sizes = {"H": 5, "L": 1024, "rope": 64, "B": 16}
    case = latent_case(*STEPS["mixed"], **sizes, dtype=half, codes=codes, device=device)
    got = ops.latent_attention(
        case.q_THE, case.cache, case.step, latent_width=1024, scale=case.scale, kernel="triton"
    )
    assert_close("out", case.exact(), got, tolerance(half))


def test_entries_unaligned_to_16_bytes(device, half, assert_close, tolerance):
    """As in a model with rotated keys of 12 numbers."""
    sizes = {"H": 4, "L": 32, "rope": 12, "B": 16}
    case = latent_case(*STEPS["mixed"], **sizes, dtype=half, device=device)
    for attend in (triton_latent.latent_attention, triton_segments.latent_attention):
        got = attend(case.q_THE, case.cache, case.step, latent_width=32, scale=case.scale)
        assert_close(attend.__module__, case.exact(), got, tolerance(half))


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


@pytest.mark.parametrize("codes", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("H, L, rope", [(3, 48, 16), (5, 64, 32)])
def test_entries_and_queries_equal_reference(H, L, rope, interleaved, codes, dtype, device, poison):
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
        cache = PagedLatents.zeros((3, 4, L + rope), codes or dtype, torch.device(device))
        q_THE = ops.rope_write_latents_(
            q_THR,
            made,
            norm,
            cos_sin,
            positions.to(device),
            cache,
            slots.to(device),
            eps=1e-6,
            interleaved=interleaved,
            kernel=kernel,
        )
        scales = cache.pages if cache.scales is None else cache.scales
        found.append((q_THE[..., L:], scales, cache.pages.float()))
    written = found[0][2].flatten(0, 1).any(1).nonzero().flatten().tolist()
    assert written == [0, 5, 11]
    rtol = 2e-3 if dtype != torch.float32 else 1e-5
    for got, want in zip(found[0][:2], found[1][:2], strict=True):
        torch.testing.assert_close(got, want, rtol=rtol, atol=1e-5)
    if codes:  # a number at the edge of two codes may have the one or the other
        differ = found[0][2] != found[1][2]
        assert differ.float().mean() < 0.02
        assert (found[0][2] - found[1][2]).abs().amax() <= (1 if codes == torch.int8 else 32)


# counts and lengths
CHUNKS = {
    "from the start": ((40,), (40,)),
    "after a context": ((9,), (83,)),
    "one row": ((1,), (130,)),
    "three requests": ((40, 3, 20), (40, 70, 150)),
}


@pytest.mark.parametrize("max_bytes, codes", [(1, None), (2**28, None), (2**28, torch.int8)])
@pytest.mark.parametrize("P, V", [(24, 40), (16, 48), (24, 16)])
@pytest.mark.parametrize("name", CHUNKS)
def test_expanded_keys_equal_absorbed_queries(
    name,
    P,  # noqa: N803
    V,  # noqa: N803
    max_bytes,
    codes,
    dtype,
    device,
    assert_close,
    tolerance,
):
    """1 byte: head by head. The second request, of one row, is not expanded."""
    counts, lengths = ((each[0], 1, *each[1:]) for each in CHUNKS[name])
    H, L, rope, T = 5, 64, 16, sum(counts)
    sizes = {"H": H, "L": L, "rope": rope, "B": 16, "dtype": dtype}
    case = latent_case(counts, lengths, **sizes, codes=codes, device=device)
    generator = torch.Generator().manual_seed(P)
    key_up = torch.randn(H, P, L, generator=generator).to(dtype)
    value_up = torch.randn(H, L, V, generator=generator).to(dtype)
    q_n = torch.randn(T, H, P, generator=generator).to(dtype) / 8
    q_r = case.q_THE[..., L:].cpu()
    absorbed = torch.cat([torch.einsum("thp,hpl->thl", q_n.double(), key_up.double()), q_r], -1)
    out = replace(case, q_THE=absorbed).exact()
    chunks = chunks_of(case, [r for r in range(len(counts)) if r != 1])
    got = expanded_attention(
        torch.cat([q_n, q_r], -1)[chunks.rows].to(device),
        case.cache,
        chunks,
        key_up.to(device),
        value_up.to(device),
        scale=case.scale,
        max_bytes=max_bytes,
        max_keys=48,
    )
    want = torch.einsum("thl,hlv->thv", out, value_up.double())[chunks.rows]
    assert_close("out", want, got, 2 * tolerance(dtype))


def chunks_of(case, chosen):
    """Pages of each request, the last one repeated until they fill pages of 64 keys."""
    device = case.q_THE.device
    starts = [sum(case.counts[:r]) for r in chosen]
    rows = [torch.arange(s, s + case.counts[r]) for s, r in zip(starts, chosen, strict=True)]
    key_pages = [-(-case.lengths[r] // 64) for r in chosen]
    pages = []
    for r, count in zip(chosen, key_pages, strict=True):
        last = -(-case.lengths[r] // case.cache.page_size) - 1
        index = torch.arange(count * 64 // case.cache.page_size).clamp(max=last)
        pages.append(case.step.block_tables_RX[r, index.to(device)].long())
    firsts = torch.tensor([sum(key_pages[:i]) for i in range(len(chosen))])
    counts = torch.tensor([0, *(case.counts[r] for r in chosen)])
    int32 = {"dtype": torch.int32, "device": device}
    return ExpandedChunks(
        rows=torch.cat(rows),
        pages_X=torch.cat(pages),
        step=AttentionStep(
            block_tables_RX=(firsts[:, None] + torch.arange(max(key_pages))).to(**int32),
            query_starts_R1=counts.cumsum(0).to(**int32),
            context_lengths_R=torch.tensor([case.lengths[r] for r in chosen], **int32),
            max_query_len=int(counts.max()),
            max_context_len=max(case.lengths[r] for r in chosen),
        ),
    )
