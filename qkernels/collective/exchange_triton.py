"""Exchange between ranks inside a kernel, in which the data words are their own ready flags.

Numbers are sent as 32-bit words, one float32 or two 16-bit numbers each. A receiver's slots hold
the marker, a word of ones, until a sender's word is there. The marker is one or two NaNs, and a
sender replaces it by another NaN, so no value is lost. Words are written atomically, so no fence or
separate flag is needed. Loads are volatile: they go to the L2, where the peers' stores arrive.

A rank has a slot for each other rank, in their order. The rank is a run-time argument, so all ranks
run the same kernel.

    slots = slots_of_peers(bases_ptr, stride_slot, rank, RANKS)
    exchange = Exchange(slots, stride_slot, rank, Wait(spin_limit, broken_ptr, report_ptr))
    .. wait for the previous kernel
    words = outgoing(x)
    send(words, exchange, offsets, mask, RANKS)
    total = sum_of_ranks(words, own_ptr + offsets, exchange, mask, DTYPE, RANKS, GROUP)
"""

from typing import NamedTuple

import triton
import triton.language as tl

# Polls of a peer per poll of the host's memory, which is slow because it is across a bus.
LOOKS_A_LOOK_AT_THE_HOST = tl.constexpr(1024)


class Wait(NamedTuple):
    """Limit of a block's wait for a peer, and the address to report a peer that sent nothing."""

    spin_limit: tl.tensor  # polls
    broken_ptr: tl.tensor
    report_ptr: tl.tensor


class Exchange(NamedTuple):
    """Channel (channels.py) as arguments of a kernel. Legend: n ranks."""

    slots: tl.tuple  # n - 1 pointers: this rank's slot at each peer
    stride_slot: tl.tensor
    rank: tl.tensor
    wait: Wait


@triton.jit
def peer(slot, rank):
    """Return the rank whose words are in a slot of this rank."""
    return slot + (slot >= rank)


@triton.jit
def slots_of_peers(bases_ptr, stride_slot, rank, RANKS: tl.constexpr):
    """Return pointers to this rank's slot at each peer. The addresses never change."""
    slots = ()
    for i in tl.static_range(RANKS - 1):
        receiver = peer(i, rank)
        base = tl.load(bases_ptr + receiver).to(tl.pointer_type(tl.int32))
        slots = slots + (tl.multiple_of(base, 16) + (rank - (rank > receiver)) * stride_slot,)
    return slots


@triton.jit
def outgoing(x):
    """Convert numbers [BLOCK] to words [BLOCK] or [BLOCK / 2]. No word equals the marker."""
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.int16, bitcast=True).reshape(x.shape[0] // 2, 2)
        low, high = bits.split()
        words = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
        return tl.where(words == -1, 0x7FFF7FFF, words)
    else:
        words = x.to(tl.int32, bitcast=True)
        return tl.where(words == -1, 0x7FFFFFFF, words)


@triton.jit
def numbers(words, DTYPE: tl.constexpr):
    """Convert words to numbers."""
    if DTYPE.primitive_bitwidth == 16:
        low, high = words.to(tl.int16), (words >> 16).to(tl.int16)
        bits = tl.join(low, high).reshape(2 * words.shape[0])
    else:
        bits = words
    return bits.to(DTYPE, bitcast=True)


@triton.jit
def send(words, exchange, offsets, mask, RANKS: tl.constexpr):
    """Write words into this rank's slot at every peer."""
    for i in tl.static_range(RANKS - 1):
        tl.store(exchange.slots[i] + offsets, words, mask=mask)


@triton.jit
def arrived(words, ptrs, mask, sender, wait):
    """Wait until `ptrs` holds a sender's words, and return them. `words`: the first load of `ptrs`.

    After `wait.spin_limit` polls it gives up and stores the sender's rank + 1 in `broken_ptr` and
    `report_ptr`. No block waits if `broken_ptr` is not 0. The host can stop the wait by writing a
    negative number to `report_ptr`, which is in host memory, so it needs no stream.
    """
    spins = 0
    going = 1
    while (tl.max((words == -1).to(tl.int32), 0) != 0) & (going != 0):
        words = tl.load(ptrs, mask=mask, other=0, volatile=True)
        spins += 1
        if spins % LOOKS_A_LOOK_AT_THE_HOST == 0:
            reported = tl.load(wait.report_ptr, volatile=True)
            if reported < 0:
                tl.store(wait.broken_ptr, reported)
        unbroken = tl.load(wait.broken_ptr, volatile=True) == 0
        going = (unbroken & (spins < wait.spin_limit)).to(tl.int32)
    if spins >= wait.spin_limit:
        tl.store(wait.broken_ptr, sender + 1)
        tl.store(wait.report_ptr, sender + 1)
    return words


@triton.jit
def sum_of_ranks(
    own,  # this rank's own words
    ptrs,  # pointers to the same words in the first slot
    exchange,
    mask,
    DTYPE: tl.constexpr,
    RANKS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Return the float32 sum in rank order. Loads of GROUP slots are in flight together."""
    rank, stride_slot = exchange.rank, exchange.stride_slot
    total = None
    before = own  # words of the previous slot: rank i's, if this rank comes before it
    for first in tl.static_range(0, RANKS - 1, GROUP):
        loads = ()
        for i in tl.static_range(first, min(first + GROUP, RANKS - 1)):
            loads = loads + (tl.load(ptrs + i * stride_slot, mask=mask, other=0, volatile=True),)
        for i in tl.static_range(first, min(first + GROUP, RANKS - 1)):
            place = ptrs + i * stride_slot
            sender = peer(i, rank)
            words = arrived(loads[i - first], place, mask, sender, exchange.wait)
            of_rank_i = tl.where(rank == i, own, tl.where(rank < i, before, words))
            share = numbers(of_rank_i, DTYPE).to(tl.float32)
            total = share if i == 0 else total + share
            before = words
    return total + numbers(tl.where(rank == RANKS - 1, own, before), DTYPE).to(tl.float32)


@triton.jit
def clear(ptrs, stride_slot, mask, RANKS: tl.constexpr):
    """Write the marker into every slot."""
    marker = tl.full(ptrs.shape, -1, tl.int32)
    for i in tl.static_range(RANKS - 1):
        tl.store(ptrs + i * stride_slot, marker, mask=mask)
