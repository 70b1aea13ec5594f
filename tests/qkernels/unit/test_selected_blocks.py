"""Selection of blocks of keys by an indexer, and attention over them, against float64."""

import pytest
import torch

from qkernels import ops
from qkernels.attention.cache import PagedKv
from qkernels.attention.selected import order
from qkernels.errors import KernelError
from tests.qkernels.block_case import blocks_of, exact_attention
from tests.qkernels.selected_case import selected_case

STEPS = [((1, 1, 1), (70, 1, 17)), ((5, 9), (5, 90)), ((1, 6, 0, 1), (33, 20, 4, 2))]
SIZES = {"heads": 3, "D": 24, "B": 8}


@pytest.mark.parametrize(("counts", "lengths"), STEPS)
@pytest.mark.parametrize("most, local", [(1, 1), (2, 1), (3, 2), (2, 0), (2, 3), (50, 1)])
@pytest.mark.parametrize("block_size, rows", [(16, 1000), (8, 2)])
def test_blocks_with_the_highest_scores(
    counts, lengths, most, local, block_size, rows, monkeypatch
):
    """Pages of other requests, and the rest of last pages, hold NaN."""
    case = selected_case(counts, lengths, **SIZES, dtype=torch.float32)
    num_blocks = -(-max(lengths) // block_size)
    monkeypatch.setattr(order, "MAX_BYTES", 4 * 3 * num_blocks * rows)
    found = ops.select_blocks(
        case.q_TID, case.keys_PBD, case.step, block_size=block_size, most=most, local=local
    )
    of_block, tables = block_size // 8, case.step.block_tables_RX
    assert found.tables_JTX.shape == (3, sum(counts), min(most, num_blocks) * of_block)
    requests = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).tolist()
    positions = [n - c + i for c, n in zip(counts, lengths, strict=True) for i in range(c)]
    want = blocks_of(case, block_size=block_size, most=most, local=local)
    for row, (request, position) in enumerate(zip(requests, positions, strict=True)):
        for head in range(3):
            blocks = want[row][head]
            keys = sum(min(block_size, position + 1 - block * block_size) for block in blocks)
            assert found.counts_JT[head, row] == keys
            pages = [block * of_block + i for block in blocks for i in range(of_block)]
            used = -(-keys // 8)
            got = found.tables_JTX[head, row]
            assert got[:used].tolist() == tables[request, pages[:used]].tolist()


def test_rows_that_belong_to_no_request_see_no_keys():
    case = selected_case((1, 2), (40, 20), **SIZES, dtype=torch.float32)
    q_TJD = torch.cat([case.q_TID, case.q_TID[:2]])
    found = ops.select_blocks(q_TJD, case.keys_PBD, case.step, block_size=16, most=2, local=1)
    assert (found.counts_JT[:, 3:] == 0).all() and not found.tables_JTX[:, 3:].any()
    assert (found.counts_JT[:, :3] > 0).all()


@pytest.mark.parametrize(("counts", "lengths"), STEPS)
def test_attention_over_selected_blocks(counts, lengths):
    case = selected_case(counts, lengths, **SIZES, dtype=torch.float32)
    generator = torch.Generator().manual_seed(4)
    pages = len(case.keys_PBD), 8, 3, 16
    kv = PagedKv(
        k_pages=torch.randn(pages, generator=generator),
        v_pages=torch.randn(pages, generator=generator),
    )
    q_THD = torch.randn(sum(counts), 6, 16, generator=generator)
    selected = ops.select_blocks(
        case.q_TID, case.keys_PBD, case.step, block_size=16, most=2, local=1
    )
    got = ops.block_attention(q_THD, kv, selected, scale=0.3)
    blocks = blocks_of(case, block_size=16, most=2, local=1)
    want = exact_attention(q_THD, kv, case, blocks, 16)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_blocks_that_pages_do_not_divide_are_refused():
    case = selected_case((1,), (40,), **SIZES, dtype=torch.float32)
    with pytest.raises(KernelError, match="multiple of the page size 8, found 12"):
        ops.select_blocks(case.q_TID, case.keys_PBD, case.step, block_size=12, most=2, local=1)
