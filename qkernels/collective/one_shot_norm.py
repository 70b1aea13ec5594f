"""One-shot all-reduce, residual and norm in one kernel, with the result in any form.

The sum over ranks replaces the sum over split-K partials: each rank sends the float32 sum of its
partials, or its tensor unchanged. A block has one row, or with few rows a part of a row. It sends
its part, waits for the whole row from all ranks, and writes its part of the results. Each block of
a row computes the row's sum of squares.

Each row or part belongs to one block. Each block counts its calls, which rotate through three
phases of the buffer. A block writes the marker over its part of the previous phase, which all
blocks of its row have read. A peer writes there again two calls later. It can reach that call only
after it received what this rank sends in the next call.

The computation after the sum over ranks is that of rowwise/norm.py. Legend: M rows, C channels.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from qkernels.collective.channels import Peers
from qkernels.collective.config import num_words, rows_warps
from qkernels.collective.exchange_triton import (
    Exchange,
    Wait,
    clear,
    outgoing,
    send,
    slots_of_peers,
    sum_of_ranks,
)
from qkernels.gpu.config import power_of_two
from qkernels.gpu.device import INTERPRETED
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl import pdl_launch_and_wait, pdl_options
from qkernels.operands.codes import Codes, InputRounding
from qkernels.operands.codes_triton import empty_codes, rounding_constants
from qkernels.operands.forms import InputForm, LinearInput
from qkernels.operands.limbs import LimbForm, empty_limbs
from qkernels.operands.limbs_triton import load_steps, store_limbs
from qkernels.operands.split_k import LinearOutput
from qkernels.operands.split_k_triton import contiguous, load_reduced, partials_source
from qkernels.rowwise.arithmetic_triton import (
    changed_branch,
    normalized,
    row_statistics,
    store_row,
)
from qkernels.rowwise.ops import in_form
from qkernels.rowwise.spec import PLAIN, Branch, NormSpec, norm_constants, norm_tensors

# Stages of a launch. Triton's interpreter runs blocks one after another, but blocks of a row wait
# for each other's peers, so there sending and the rest are two launches.
WHOLE: tl.constexpr = tl.constexpr(0)
SEND: tl.constexpr = tl.constexpr(1)
FINISH: tl.constexpr = tl.constexpr(2)

# Register limits: words of peers that a thread has in flight, and channels per thread up to which
# residual and weight are loaded before the kernel waits.
WORDS_OF_LOADS = 32
EARLY_CHANNELS = 16


def all_reduce_norm(
    x_MC: LinearOutput,
    residual_MC: torch.Tensor,
    spec: NormSpec | None,
    peers: Peers,
    out: InputForm = None,
    branch: Branch = PLAIN,
) -> tuple[LinearInput, torch.Tensor]:
    """Implement ops.all_reduce_norm in one kernel, for rows for which the peers have a channel."""
    if isinstance(out, LimbForm) and out.with_tensor:
        normed_MC, total_MC = all_reduce_norm(x_MC, residual_MC, spec, peers, None, branch)
        return in_form(normed_MC, out), total_MC
    M, C = x_MC.shape
    source, stride_part, format = partials_source(contiguous(x_MC))
    layout, channel = peers.rows(x_MC)
    if layout.item_bytes == 4:  # partial sums are not rounded before they are sent
        format = replace(format, dtype=tl.float32)
    residual_MC = residual_MC.contiguous()
    total_MC = torch.empty_like(residual_MC)
    block = power_of_two(C)
    warps = rows_warps(C)
    of_thread = max(1, block // (32 * warps))
    early = of_thread <= EARLY_CHANNELS
    arguments = (
        source,
        stride_part,
        residual_MC,
        *norm_tensors(spec),
        *norm_tensors(branch.norm),
        total_MC,
        channel.words,
        *channel.arguments,
        C,
        num_words(C, layout.item_bytes),
        channel.slot_words,
        0.0 if spec is None else spec.eps,
        peers.rank,
        peers.spin_limit,
    )
    constants = {
        **norm_constants(spec, branch),
        "RANKS": peers.ranks,
        "PART": layout.part,
        "GROUP": max(1, WORDS_OF_LOADS * 4 // (of_thread * layout.item_bytes)) if early else 1,
        "EARLY": early,
        "BLOCK": block,
        "SUM": format,
        "num_warps": warps,
        **pdl_options(residual_MC, M),
    }
    grid = (layout.parts, M)
    with on_device(residual_MC):
        if isinstance(out, LimbForm):
            limbs = empty_limbs(out, M, C, residual_MC.device)
            tensors = limbs.words, limbs.scales, limbs.sums
            _launch(_all_reduce_norm_limbs, grid, (*arguments, *tensors, M), FORM=out, **constants)
            return limbs, total_MC
        if isinstance(out, InputRounding):
            y_MC, scales_M1 = empty_codes(M, C, out.activation, residual_MC.device)
            tensors = y_MC, out.scale, scales_M1
        else:
            y_MC = None if spec is None else torch.empty_like(total_MC)
            tensors = y_MC, None, None
        _launch(
            _all_reduce_norm,
            grid,
            (*arguments, *tensors),
            **rounding_constants(out),
            **constants,
        )
    if isinstance(out, InputRounding):
        return Codes(y_MC, scales_M1), total_MC
    return total_MC if y_MC is None else y_MC, total_MC


def _launch(kernel, grid: tuple[int, int], arguments: tuple, **constants: object) -> None:
    parts, _ = grid
    stages = (SEND, FINISH) if INTERPRETED and parts > 1 else (WHOLE,)
    for stage in stages:
        launch(kernel, grid, *arguments, STAGE=stage.value, **constants)


@triton.jit
def _total(
    x_ptr,
    stride_part,
    residual_ptr,
    branch_ptr,
    branch_bias_ptr,
    total_ptr,
    own_ptr,
    exchange,
    phases_ptr,
    C,
    row_words,
    BRANCH_KIND: tl.constexpr,
    BRANCH_EPS: tl.constexpr,
    BRANCH_FACTOR: tl.constexpr,
    RANKS: tl.constexpr,
    PART: tl.constexpr,
    GROUP: tl.constexpr,
    EARLY: tl.constexpr,
    STAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SUM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Return the sum of ranks and residual, rounded, in float32. Store this block's part."""
    DTYPE: tl.constexpr = residual_ptr.dtype.element_ty
    part, m = tl.program_id(0), tl.program_id(1)
    branch, branch_bias = None, None
    if branch_ptr is not None:
        c = tl.arange(0, BLOCK)
        branch = tl.load(branch_ptr + c, mask=c < C, other=0.0)
        if branch_bias_ptr is not None:
            branch_bias = tl.load(branch_bias_ptr + c, mask=c < C, other=0.0)
    if PDL:
        # constants are loaded before the wait; the previous kernel may still write the other
        # inputs
        pdl_launch_and_wait()
    counter = phases_ptr + m * tl.num_programs(0) + part
    OF_WORD: tl.constexpr = 32 // SUM.dtype.primitive_bitwidth
    c, w = tl.arange(0, BLOCK), tl.arange(0, BLOCK // OF_WORD)
    mask, words_mask = c < C, w < row_words
    own_words = words_mask & (w // (PART // OF_WORD) == part)
    row = m.to(tl.int64) * C
    phase = tl.load(counter)
    x = load_reduced(x_ptr + row + c, mask, stride_part, SUM).to(SUM.dtype)
    if EARLY:
        residual = tl.load(residual_ptr + row + c, mask=mask, other=0.0)
    words = outgoing(x)
    place = m.to(tl.int64) * row_words + w
    stride_slot = exchange.stride_slot
    offsets = phase * (RANKS - 1) * stride_slot + place
    if STAGE != FINISH:
        send(words, exchange, offsets, own_words, RANKS)
        before = own_ptr + (phase + 2) % 3 * (RANKS - 1) * stride_slot + place
        clear(before, stride_slot, own_words, RANKS)
    if STAGE == SEND:
        return x.to(tl.float32)
    ptrs = own_ptr + offsets
    total = sum_of_ranks(words, ptrs, exchange, words_mask, SUM.dtype, RANKS, GROUP)
    tl.store(counter, (phase + 1) % 3)
    # rounded like a product on one GPU
    x = total.to(DTYPE).to(tl.float32)
    x = changed_branch(
        x, branch, branch_bias, mask, C, BRANCH_KIND, BRANCH_EPS, BRANCH_FACTOR, DTYPE
    )
    if not EARLY:
        residual = tl.load(residual_ptr + row + c, mask=mask, other=0.0)
    # the residual stream has this dtype, so the norm reads the rounded sum
    rounded = (x + residual.to(tl.float32)).to(DTYPE)
    tl.store(total_ptr + row + c, rounded, mask=mask & (c // PART == part))
    return rounded.to(tl.float32)


@triton.jit(do_not_specialize=["rank", "spin_limit"])
def _all_reduce_norm(
    x_ptr,  # [M, C], or split-K partial sums of it
    stride_part,
    residual_ptr,  # [M, C]
    weight_ptr,  # [C] or None: the sum alone
    bias_ptr,  # [C] or None
    branch_ptr,  # [C] or None
    branch_bias_ptr,  # [C] or None
    total_ptr,  # [M, C]
    own_ptr,  # [3 phases, n - 1 slots, stride_slot]
    bases_ptr,
    phases_ptr,
    broken_ptr,
    report_ptr,
    C,
    row_words,
    stride_slot,
    eps,
    rank,
    spin_limit,
    out_ptr,  # [M, C], of a float type or codes; None without a weight
    scale_ptr,  # [] or None: dynamic
    scales_ptr,  # [M], or None: no codes
    KIND: tl.constexpr,
    BRANCH_KIND: tl.constexpr,
    BRANCH_EPS: tl.constexpr,
    BRANCH_FACTOR: tl.constexpr,
    RANKS: tl.constexpr,
    PART: tl.constexpr,
    GROUP: tl.constexpr,
    EARLY: tl.constexpr,
    STAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SUM: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    DTYPE: tl.constexpr = residual_ptr.dtype.element_ty
    part, m = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, BLOCK)
    slots = slots_of_peers(bases_ptr, stride_slot, rank, RANKS)
    exchange = Exchange(slots, stride_slot, rank, Wait(spin_limit, broken_ptr, report_ptr))
    bias = None
    if EARLY and weight_ptr is not None:
        weight = tl.load(weight_ptr + c, mask=c < C, other=0.0)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + c, mask=c < C, other=0.0)
    x = _total(
        x_ptr,
        stride_part,
        residual_ptr,
        branch_ptr,
        branch_bias_ptr,
        total_ptr,
        own_ptr,
        exchange,
        phases_ptr,
        C,
        row_words,
        BRANCH_KIND,
        BRANCH_EPS,
        BRANCH_FACTOR,
        RANKS,
        PART,
        GROUP,
        EARLY,
        STAGE,
        BLOCK,
        SUM,
        PDL,
    )
    if STAGE == SEND:
        return
    if out_ptr is not None:
        if weight_ptr is None:
            y = x.to(DTYPE)
        else:
            if not EARLY:
                weight = tl.load(weight_ptr + c, mask=c < C, other=0.0)
                if bias_ptr is not None:
                    bias = tl.load(bias_ptr + c, mask=c < C, other=0.0)
            mean, inverse = row_statistics(x, c < C, C, eps, KIND)
            y = normalized(x, mean, inverse, weight, bias, KIND, DTYPE)
        mine = (c < C) & (c // PART == part)
        # all blocks of a row store the same scale
        store_row(
            *(y, out_ptr, m.to(tl.int64) * C + c, mine, scale_ptr, scales_ptr, m),
            *(SMALLEST, LARGEST, MIN_SCALE, INTERPRETED),
        )


@triton.jit(do_not_specialize=["rank", "spin_limit", "M"])
def _all_reduce_norm_limbs(
    x_ptr,
    stride_part,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    branch_ptr,
    branch_bias_ptr,
    total_ptr,
    own_ptr,
    bases_ptr,
    phases_ptr,
    broken_ptr,
    report_ptr,
    C,
    row_words,
    stride_slot,
    eps,
    rank,
    spin_limit,
    words_ptr,
    scales_ptr,
    sums_ptr,
    M,
    FORM: tl.constexpr,
    KIND: tl.constexpr,
    BRANCH_KIND: tl.constexpr,
    BRANCH_EPS: tl.constexpr,
    BRANCH_FACTOR: tl.constexpr,
    RANKS: tl.constexpr,
    PART: tl.constexpr,
    GROUP: tl.constexpr,
    EARLY: tl.constexpr,
    STAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SUM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Variant of _all_reduce_norm that makes limbs of a part's 8 steps or of the whole row."""
    DTYPE: tl.constexpr = residual_ptr.dtype.element_ty
    STEPS: tl.constexpr = 8
    part, m = tl.program_id(0), tl.program_id(1)
    steps, first = C // 128, part * STEPS
    slots = slots_of_peers(bases_ptr, stride_slot, rank, RANKS)
    exchange = Exchange(slots, stride_slot, rank, Wait(spin_limit, broken_ptr, report_ptr))
    bias = None
    if weight_ptr is not None:
        weight = load_steps(weight_ptr, first, steps, STEPS, FORM)
        if bias_ptr is not None:
            bias = load_steps(bias_ptr, first, steps, STEPS, FORM)
    x = _total(
        x_ptr,
        stride_part,
        residual_ptr,
        branch_ptr,
        branch_bias_ptr,
        total_ptr,
        own_ptr,
        exchange,
        phases_ptr,
        C,
        row_words,
        BRANCH_KIND,
        BRANCH_EPS,
        BRANCH_FACTOR,
        RANKS,
        PART,
        GROUP,
        EARLY,
        STAGE,
        BLOCK,
        SUM,
        PDL,
    )
    if STAGE == SEND:
        return
    # the part is read back from memory in the order of words
    tl.debug_barrier()
    y = load_steps(total_ptr + m.to(tl.int64) * C, first, steps, STEPS, FORM)
    if weight_ptr is not None:
        mean, inverse = row_statistics(x, tl.arange(0, BLOCK) < C, C, eps, KIND)
        y = normalized(y.to(tl.float32), mean, inverse, weight, bias, KIND, DTYPE)
    store_limbs(y, words_ptr, scales_ptr, sums_ptr, m, first, M, steps, FORM)
