"""Ring buffers in pinned host memory for the inputs and sampled tokens of CUDA graph replays.

The kernels of a CUDA graph have fixed addresses. But the host writes the inputs of a step while the
previous step runs, and reads the tokens of the step before that. So inputs and tokens each have a
ring, and a counter on the device selects the entry: a replay needs no other launch. Legend: D
entries of a ring, B words of an entry, T tokens of the step, S sampled rows, R rows of `samples`.
"""

import torch
import triton
import triton.language as tl

from qkernels.gpu.config import ceil_div, power_of_two
from qkernels.gpu.launch import launch, on_device

BLOCK = 256


def receive_(
    to_B: torch.Tensor,
    ring_DB: torch.Tensor,
    counter: torch.Tensor,
    samples_R: torch.Tensor,
    num_tokens: int,
) -> None:
    """Copy the ring entry that the counter selects to `to_B`. All tensors are int64.

    The first `num_tokens` words are token ids. A negative id, -1 - r, refers to samples_R[r].
    """
    depth, count = ring_DB.shape
    assert len(to_B) <= count and num_tokens <= len(to_B), (to_B, ring_DB)
    with on_device(to_B):
        launch(
            _receive,
            (ceil_div(len(to_B), BLOCK),),
            to_B,
            ring_DB,
            counter,
            samples_R,
            len(to_B),
            num_tokens,
            count,
            DEPTH=depth,
            BLOCK=BLOCK,
            num_warps=4,
        )


def deliver_(
    tokens_S: torch.Tensor, samples_R: torch.Tensor, ring_DR: torch.Tensor, counter: torch.Tensor
) -> None:
    """Copy sampled tokens to the counter's ring entry and to `samples_R`; increment the counter.

    `samples_R` gets 0 instead of a negative token, because the next step looks up its embedding.
    """
    depth, rows = ring_DR.shape
    assert len(tokens_S) <= rows <= len(samples_R), (tokens_S, samples_R, ring_DR)
    with on_device(tokens_S):
        launch(
            _deliver,
            (1,),
            tokens_S,
            samples_R,
            ring_DR,
            counter,
            len(tokens_S),
            rows,
            DEPTH=depth,
            BLOCK=power_of_two(rows),
            num_warps=1,  # with one warp, all threads load the counter before it is stored
        )


@triton.jit(do_not_specialize=["count", "num_tokens", "stride"])
def _receive(
    to_ptr,
    ring_ptr,
    counter_ptr,
    samples_ptr,
    count,
    num_tokens,
    stride,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry_ptr = ring_ptr + (tl.load(counter_ptr) % DEPTH) * stride
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(entry_ptr + i, mask=i < count, other=0, volatile=True)
    is_pending = (i < num_tokens) & (words < 0)
    sampled = tl.load(samples_ptr + (-1 - words), mask=is_pending, other=0)
    tl.store(to_ptr + i, tl.where(is_pending, sampled, words), mask=i < count)


@triton.jit(do_not_specialize=["count", "stride"])
def _deliver(
    tokens_ptr,
    samples_ptr,
    ring_ptr,
    counter_ptr,
    count,
    stride,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.load(counter_ptr)
    i = tl.arange(0, BLOCK)
    tokens = tl.load(tokens_ptr + i, mask=i < count, other=0)
    tl.store(ring_ptr + (number % DEPTH) * stride + i, tokens, mask=i < count)
    tl.store(samples_ptr + i, tl.maximum(tokens, 0), mask=i < count)
    tl.store(counter_ptr, number + 1)
