"""Two-shot all-reduce: each rank sums its shard of the message, then sends the sum to all.

A link carries 2 (n - 1) / n times the message, instead of n - 1 times in one shot. Both exchanges
work as in one_shot.py, each over its own channel. The same block processes a tile of every shard.

Legend: N elements of the message, L of a shard; shard i is rank i's.
"""

import torch
import triton
import triton.language as tl

from qkernels.collective.channels import Peers
from qkernels.collective.config import num_words, shard_elements
from qkernels.collective.exchange_triton import (
    Exchange,
    Wait,
    arrived,
    clear,
    numbers,
    outgoing,
    peer,
    send,
    slots_of_peers,
    sum_of_ranks,
)
from qkernels.collective.one_shot import launch_over_tiles
from qkernels.gpu.pdl import pdl_launch_and_wait


def all_reduce(x: torch.Tensor, peers: Peers) -> torch.Tensor:
    """Implement ops.all_reduce for shards of at most peers.scatter.slot_bytes."""
    x = x.contiguous()
    out = torch.empty_like(x)
    item_bytes = x.element_size()
    shard = shard_elements(x.numel(), peers.ranks, item_bytes)
    scatter, gather = peers.scatter, peers.gather
    launch_over_tiles(
        _all_reduce_two_shot,
        shard,
        *(x, out, scatter.words, *scatter.arguments, gather.words, gather.bases),
        *(x.numel(), shard, num_words(x.numel(), item_bytes), num_words(shard, item_bytes)),
        scatter.slot_words,
        peers=peers,
    )
    return out


@triton.jit(do_not_specialize=["rank", "spin_limit"])
def _all_reduce_two_shot(
    x_ptr,
    out_ptr,
    scatter_ptr,  # [2 phases, n - 1 slots, stride_slot]
    scatter_bases_ptr,
    phases_ptr,
    broken_ptr,
    report_ptr,
    gather_ptr,
    gather_bases_ptr,
    N,
    L,
    num_words,
    shard_words,
    stride_slot,
    rank,
    spin_limit,
    RANKS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    WORDS: tl.constexpr = TILE * DTYPE.primitive_bitwidth // 32  # words of a tile
    scatter_slots = slots_of_peers(scatter_bases_ptr, stride_slot, rank, RANKS)
    gather_slots = slots_of_peers(gather_bases_ptr, stride_slot, rank, RANKS)
    wait = Wait(spin_limit, broken_ptr, report_ptr)
    scatter = Exchange(scatter_slots, stride_slot, rank, wait)
    gather = Exchange(gather_slots, stride_slot, rank, wait)
    block = tl.program_id(0)
    if PDL:
        pdl_launch_and_wait()
    phase = tl.load(phases_ptr + block)
    start = phase * (RANKS - 1) * stride_slot
    for tile in range(block, tl.cdiv(L, TILE), BLOCKS):
        c, w = tile * TILE + tl.arange(0, TILE), tile * WORDS + tl.arange(0, WORDS)
        for i in tl.static_range(RANKS - 1):
            first = peer(i, rank) * L
            inside = (c < L) & (first + c < N)
            mask = (w < shard_words) & (peer(i, rank) * shard_words + w < num_words)
            words = outgoing(tl.load(x_ptr + first + c, mask=inside, other=0.0))
            tl.store(scatter.slots[i] + start + w, words, mask=mask)
    for tile in range(block, tl.cdiv(L, TILE), BLOCKS):
        c, w = tile * TILE + tl.arange(0, TILE), tile * WORDS + tl.arange(0, WORDS)
        inside = (c < L) & (rank * L + c < N)
        mask = (w < shard_words) & (rank * shard_words + w < num_words)
        words = outgoing(tl.load(x_ptr + rank * L + c, mask=inside, other=0.0))
        ptrs = scatter_ptr + start + w
        total = sum_of_ranks(words, ptrs, scatter, mask, DTYPE, RANKS, GROUP=RANKS)
        # keep the bits that are sent, also for NaN
        words = outgoing(total.to(DTYPE))
        send(words, gather, start + w, mask, RANKS)
        tl.store(out_ptr + rank * L + c, numbers(words, DTYPE), mask=inside)
        clear(ptrs, stride_slot, mask, RANKS)
    for tile in range(block, tl.cdiv(L, TILE), BLOCKS):
        c, w = tile * TILE + tl.arange(0, TILE), tile * WORDS + tl.arange(0, WORDS)
        for i in tl.static_range(RANKS - 1):
            sender = peer(i, rank)
            first = sender * L
            inside = (c < L) & (first + c < N)
            mask = (w < shard_words) & (peer(i, rank) * shard_words + w < num_words)
            ptrs = gather_ptr + start + i * stride_slot + w
            words = tl.load(ptrs, mask=mask, other=0, volatile=True)
            words = arrived(words, ptrs, mask, sender, wait)
            tl.store(out_ptr + first + c, numbers(words, DTYPE), mask=inside)
            tl.store(ptrs, tl.full(ptrs.shape, -1, tl.int32), mask=mask)
    tl.store(phases_ptr + block, 1 - phase)
