"""Scores of an indexer and attention over selected keys in Triton: interpreted on a CPU, compiled
on a GPU.
"""

import pytest
import torch

from qkernels import ops
from qkernels.attention.cache import PagedKv
from qkernels.attention.selected import reference as block_reference
from qkernels.attention.selected import triton_scores as block_kernel
from qkernels.attention.selected.order import rows_and_positions
from qkernels.latent.selected import triton_scores
from qkernels.latent.selected.selected_keys import SelectedKeys
from tests.qkernels.latent_case import latent_case
from tests.qkernels.selected_case import selected_case

STEPS = {
    "decode": ((1, 1, 1), (70, 1, 17)),
    "chunks": ((5, 9), (5, 90)),
    "mixed": ((1, 6, 0, 1), (33, 20, 4, 2)),
}


@pytest.mark.parametrize("heads, D, B", [(16, 32, 16), (5, 24, 8), (64, 128, 32)])
@pytest.mark.parametrize("name", STEPS)
def test_scores(name, heads, D, B, dtype, device, assert_close, tolerance):
    counts, lengths = STEPS[name]
    case = selected_case(counts, lengths, heads=heads, D=D, B=B, dtype=dtype, device=device)
    requests_T, last_T = rows_and_positions(case.step, sum(counts))
    got = triton_scores.index_scores(
        case.q_TID,
        case.weights_TI,
        case.keys_PBD,
        case.step.block_tables_RX,
        requests_T,
        last_T,
        num_keys=max(lengths),
    )
    for scores, want in zip(got.cpu(), case.exact(), strict=True):
        assert_close("scores", want, scores[: len(want)], tolerance(dtype))
        assert (scores[len(want) :] == -torch.inf).all()


@pytest.mark.parametrize("codes", [None, torch.int8])
@pytest.mark.parametrize("S", [5, 40])
def test_attention_over_selected_slots(S, codes, dtype, device, assert_close, tolerance):
    """As the reference, with counts from 1 to all."""
    sizes = {"H": 5, "L": 48, "rope": 16, "B": 16}
    case = latent_case((4, 3), (60, 50), **sizes, dtype=dtype, codes=codes, device=device)
    generator = torch.Generator().manual_seed(1)
    slots = torch.zeros(7, S, dtype=torch.int32)
    counts = torch.tensor([1, 2, S, S, S - 1, 3, S], dtype=torch.int32)
    tables = case.step.block_tables_RX.cpu()
    for row, count in enumerate(counts.tolist()):
        t = torch.randperm(50, generator=generator)[:count].sort().values
        slots[row, :count] = tables[row // 4, t // 16] * 16 + t % 16
    selected = SelectedKeys(slots_TS=slots.to(device), counts_T=counts.to(device))
    settings = {"latent_width": 48, "scale": case.scale}
    found = [
        ops.selected_latent_attention(case.q_THE, case.cache, selected, **settings, kernel=kernel)
        for kernel in ("triton", "reference")
    ]
    assert_close("out", found[1].double().cpu(), found[0], tolerance(dtype))


@pytest.mark.parametrize("heads, D, B, size", [(4, 32, 16, 128), (3, 24, 8, 16), (2, 128, 16, 32)])
@pytest.mark.parametrize("name", STEPS)
def test_scores_of_blocks(name, heads, D, B, size, dtype, device, assert_close, tolerance):
    """As the reference; blocks that a row does not see have minus infinity."""
    counts, lengths = STEPS[name]
    case = selected_case(counts, lengths, heads=heads, D=D, B=B, dtype=dtype, device=device)
    requests_T, last_T = rows_and_positions(case.step, sum(counts))
    rows = (case.keys_PBD, case.step.block_tables_RX, requests_T, last_T)
    sizes = {"num_keys": max(lengths), "block_size": size}
    got = block_kernel.block_scores(case.q_TID, *rows, **sizes)
    want = block_reference.block_scores(case.q_TID, *rows, **sizes)
    unseen = torch.arange(want.shape[2], device=device) * size > last_T[:, None, None]
    assert torch.equal(got == -torch.inf, unseen.expand_as(got))
    assert_close(
        "scores", want[want > -torch.inf].double(), got[got > -torch.inf], tolerance(dtype)
    )


@pytest.mark.parametrize("codes", [None, torch.int8])
def test_attention_over_selected_blocks(codes, dtype, device, assert_close, tolerance):
    """Each KV head is a view of the pages; as the reference."""
    counts, lengths = (1, 5), (200, 150)
    case = selected_case(counts, lengths, heads=2, D=32, B=16, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(5)
    P = len(case.keys_PBD)
    cache = PagedKv.zeros((P, 16, 2, 32), codes or dtype, device)
    k_TJD, v_TJD = (torch.randn(P * 16, 2, 32, generator=generator).to(device, dtype) for _ in "kv")
    ops.write_kv_(k_TJD, v_TJD, cache, torch.arange(P * 16, device=device))
    q_THD = torch.randn(6, 6, 32, generator=generator).to(device, dtype)
    selected = ops.select_blocks(
        case.q_TID, case.keys_PBD, case.step, block_size=32, most=2, local=1
    )
    assert (selected.counts_JT[0] != selected.counts_JT[1]).any() or (
        selected.tables_JTX[0] != selected.tables_JTX[1]
    ).any()
    found = [
        ops.block_attention(q_THD, cache, selected, scale=0.2, kernel=kernel)
        for kernel in ("triton", "reference")
    ]
    assert_close("out", found[1].double().cpu(), found[0], tolerance(dtype))
