"""One-shot all-reduce: every rank sends all of its data to every other rank, and each adds them.

Each tile belongs to the same block in every call. Each block counts its calls, which alternate
between two phases of the buffer. A block restores the marker as it reads. A peer writes the same
phase again two calls later. It can reach that call only after it received this rank's data of the
call between, which began after this call had ended.

Legend: N elements of the message.
"""

import torch
import triton
import triton.language as tl

from qkernels.collective.channels import Peers
from qkernels.collective.config import BLOCKS, TILE_BYTES, TILE_WARPS, num_words
from qkernels.collective.exchange_triton import (
    Exchange,
    Wait,
    clear,
    outgoing,
    send,
    slots_of_peers,
    sum_of_ranks,
)
from qkernels.gpu.config import ceil_div
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl import pdl_launch_and_wait, pdl_options


def all_reduce(x: torch.Tensor, peers: Peers) -> torch.Tensor:
    """Implement ops.all_reduce for at most peers.flat.slot_bytes."""
    x = x.contiguous()
    out = torch.empty_like(x)
    channel = peers.flat
    words = num_words(x.numel(), x.element_size())
    launch_over_tiles(
        _all_reduce_one_shot,
        x.numel(),
        *(x, out, channel.words, *channel.arguments),
        *(x.numel(), words, channel.slot_words),
        peers=peers,
    )
    return out


def launch_over_tiles(
    kernel: object, elements: int, x: torch.Tensor, *arguments: object, peers: Peers
) -> None:
    """Launch a kernel on a flat message unless it is empty; its blocks divide tiles of `elements`.

    After x and the arguments, the kernel takes rank, spin_limit, RANKS, TILE, BLOCKS and PDL.
    """
    tile = TILE_BYTES // x.element_size()
    tiles = ceil_div(elements, tile)
    if not tiles:
        return
    with on_device(x):
        launch(
            kernel,
            (min(BLOCKS, tiles),),
            x,
            *arguments,
            peers.rank,
            peers.spin_limit,
            RANKS=peers.ranks,
            TILE=tile,
            BLOCKS=BLOCKS,
            num_warps=TILE_WARPS,
            **pdl_options(x, tiles),
        )


@triton.jit(do_not_specialize=["rank", "spin_limit"])
def _all_reduce_one_shot(
    x_ptr,
    out_ptr,
    own_ptr,  # [2 phases, n - 1 slots, stride_slot]
    bases_ptr,
    phases_ptr,
    broken_ptr,
    report_ptr,
    N,
    num_words,
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
    slots = slots_of_peers(bases_ptr, stride_slot, rank, RANKS)
    exchange = Exchange(slots, stride_slot, rank, Wait(spin_limit, broken_ptr, report_ptr))
    block = tl.program_id(0)
    if PDL:
        pdl_launch_and_wait()
    phase = tl.load(phases_ptr + block)
    start = phase * (RANKS - 1) * stride_slot
    for tile in range(block, tl.cdiv(N, TILE), BLOCKS):
        c, w = tile * TILE + tl.arange(0, TILE), tile * WORDS + tl.arange(0, WORDS)
        mask = w < num_words
        words = outgoing(tl.load(x_ptr + c, mask=c < N, other=0.0))
        send(words, exchange, start + w, mask, RANKS)
    for tile in range(block, tl.cdiv(N, TILE), BLOCKS):
        c, w = tile * TILE + tl.arange(0, TILE), tile * WORDS + tl.arange(0, WORDS)
        mask = w < num_words
        words = outgoing(tl.load(x_ptr + c, mask=c < N, other=0.0))
        ptrs = own_ptr + start + w
        total = sum_of_ranks(words, ptrs, exchange, mask, DTYPE, RANKS, GROUP=RANKS)
        tl.store(out_ptr + c, total.to(DTYPE), mask=c < N)
        clear(ptrs, stride_slot, mask, RANKS)
    tl.store(phases_ptr + block, 1 - phase)
