"""Blocks of rows: which request owns a program's block."""

import pytest
import torch
import triton
import triton.language as tl

from qkernels.gpu.row_blocks import request_of


@triton.jit(do_not_specialize=["R"])  # as in the kernel: a constant 1 would not loop
def _owners(starts_ptr, out_ptr, R, BLOCK_Q: tl.constexpr, EVERY: tl.constexpr):
    block = tl.program_id(0) * EVERY
    request = request_of(starts_ptr, block, R, BLOCK_Q)
    tl.store(out_ptr + tl.program_id(0), request)


@pytest.mark.parametrize("block_q", [1, 4])
@pytest.mark.parametrize("R, every", [(1, 1), (2, 1), (31, 3), (32, 3), (33, 3), (1100, 61)])
def test_row_block_finds_its_request(device, R, every, block_q):
    """Against a search of all, requests without rows among them."""
    generator = torch.Generator().manual_seed(R)
    counts = torch.randint(0, 7, (R,), generator=generator)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    blocks = torch.arange(0, int(starts[-1]) // block_q + R, every)
    found = torch.full((len(blocks),), -1, dtype=torch.int32, device=device)
    _owners[(len(blocks),)](starts.to(device), found, R, BLOCK_Q=block_q, EVERY=every)
    first_blocks = starts[:-1] // block_q + torch.arange(R)
    want = torch.searchsorted(first_blocks, blocks, right=True) - 1
    assert found.tolist() == want.tolist()
