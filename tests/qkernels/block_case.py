"""Rows of an indexer of blocks with random numbers. Legend as in attention/selected/ops.py."""

import torch

from qkernels.attention.cache import PagedKv
from tests.qkernels.selected_case import SelectedCase


def blocks_of(
    case: SelectedCase, *, block_size: int, most: int, local: int
) -> list[list[list[int]]]:
    """Return the selected blocks of each row and head, by position, computed in float64."""
    found, row, B = [], 0, case.keys_PBD.shape[1]
    tables, keys_PBD = case.step.block_tables_RX.cpu(), case.keys_PBD.cpu().double()
    for r, (count, length) in enumerate(zip(case.counts, case.lengths, strict=True)):
        for i in range(count):
            position = length - count + i
            t = torch.arange(position + 1)
            keys = keys_PBD[tables[r, t // B].long(), t % B]
            scores = case.q_TID[row].cpu().double() @ keys.T
            best = torch.stack([each.amax(-1) for each in scores.split(block_size, 1)], 1)
            own = position // block_size
            best[:, max(0, own - local + 1) : own + 1 if local else 0] = torch.inf
            order = (
                best.sort(dim=1, descending=True, stable=True).indices[:, :most].sort(dim=1).values
            )
            found.append(order.tolist())
            row += 1
    return found


def seen_keys(blocks: list[int], position: int, block_size: int) -> list[int]:
    """Return the positions of a row's keys in selected blocks."""
    every = range(position + 1)
    return [t for t in every if t // block_size in blocks]


def exact_attention(
    q_THD: torch.Tensor, kv: PagedKv, case: SelectedCase, blocks: list, block_size: int
) -> torch.Tensor:
    """Return attention of each row over its blocks in float64, [T, H, D]."""
    J, B = kv.num_kv_heads, kv.page_size
    tables = case.step.block_tables_RX.cpu()
    out = torch.empty(q_THD.shape, dtype=torch.float64)
    group, row = q_THD.shape[1] // J, 0
    for r, (count, length) in enumerate(zip(case.counts, case.lengths, strict=True)):
        for i in range(count):
            position = length - count + i
            for j in range(J):
                t = torch.tensor(seen_keys(blocks[row][j], position, block_size))
                index = tables[r, t // B].long(), t % B
                k, v = (x.cpu().double()[index][:, j] for x in (kv.k_pages, kv.v_pages))
                heads = slice(j * group, (j + 1) * group)
                scores = q_THD[row, heads].cpu().double() @ k.T * 0.3
                out[row, heads] = scores.softmax(-1) @ v
            row += 1
    return out
