"""All-reduce in one shot, residual and norm in one kernel; the result plain, as codes or as limbs.

Sums over ranks come where split-K sums come: each rank sends the float32 sum of its parts, or its
tensor as it is. A block has one row, or a part of a row of few: it sends its part, waits for the
whole row from all ranks, and writes its part of the results. The sum of squares of the row is
computed by each of its blocks.

Rows and parts belong to blocks, which count their calls: these go through three phases of the
buffer. A block writes the marker over its part of the phase before, which all blocks of its row
have read; a peer writes there again two calls later, and it can only be there if it received what
this rank sends in the next call.

What follows the sum over ranks is that of rowwise/norm_act*.py. Legend: M rows, C channels.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from formats.activation import MIN_INPUT_SCALE
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
from qkernels.linear.plan import InputForm, LinearInput
from qkernels.operands.codes import CODE_DTYPES, Codes, InputRounding
from qkernels.operands.codes_triton import CODE_RANGE, encode, scale_of_chunks
from qkernels.operands.limbs import LimbForm, empty_limbs
from qkernels.operands.limbs_triton import load_steps, store_limbs
from qkernels.operands.split_k import LinearOutput
from qkernels.operands.split_k_triton import contiguous, load_reduced, partials_source
from qkernels.rowwise.branch import PLAIN, Branch
from qkernels.rowwise.branch_triton import changed_branch, weighted
from qkernels.rowwise.into_form import in_form

# What a launch does. Triton's interpreter runs one block after another, and blocks that share a row
# wait for each other's peers: there sending and the rest are two launches.
WHOLE: tl.constexpr = tl.constexpr(0)
SEND: tl.constexpr = tl.constexpr(1)
FINISH: tl.constexpr = tl.constexpr(2)

# Words of peers that a thread has under way at once, and channels of a thread up to which residual
# and weight are loaded before the kernel waits: what fits into registers.
WORDS_OF_LOADS = 32
EARLY_CHANNELS = 16


def all_reduce_add_rms_norm_into(
    x_MC: LinearOutput,
    residual_MC: torch.Tensor,
    weight_C: torch.Tensor | None,
    eps: float,
    form: InputForm,
    peers: Peers,
    branch: Branch = PLAIN,
) -> tuple[LinearInput, torch.Tensor]:
    """As ops.all_reduce_add_rms_norm_into, of rows for which the peers have a channel."""
    if isinstance(form, LimbForm) and form.with_tensor:
        normed_MC, total_MC = all_reduce_add_rms_norm_into(
            x_MC, residual_MC, weight_C, eps, None, peers, branch
        )
        return in_form(normed_MC, form), total_MC
    M, C = x_MC.shape
    source, stride_part, format = partials_source(contiguous(x_MC))
    layout, channel = peers.rows(x_MC)
    if format.parts and layout.item_bytes == 4:  # no one rounds them before they are sent
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
        weight_C,
        branch.norm_C,
        total_MC,
        channel.words,
        *channel.arguments,
        C,
        num_words(C, layout.item_bytes),
        channel.slot_words,
        eps,
        peers.rank,
        peers.spin_limit,
    )
    constants = {
        **branch.launch_constants(),
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
        if isinstance(form, LimbForm):
            limbs = empty_limbs(form, M, C, residual_MC.device)
            tensors = limbs.words, limbs.scales, limbs.sums
            _launch(_all_reduce_norm_limbs, grid, (*arguments, *tensors, M), FORM=form, **constants)
            return limbs, total_MC
        if isinstance(form, InputRounding):
            dtype = CODE_DTYPES[form.activation.type]
            smallest, largest = CODE_RANGE[dtype]
            out_MC = torch.empty((M, C), dtype=dtype, device=residual_MC.device)
            scales_M1 = torch.empty((M, 1), dtype=torch.float32, device=residual_MC.device)
            tensors = out_MC, form.scale, scales_M1
        else:
            smallest = largest = 0.0
            out_MC = total_MC if weight_C is None else torch.empty_like(total_MC)
            tensors = (None if weight_C is None else out_MC), None, None
        _launch(
            _all_reduce_norm,
            grid,
            (*arguments, *tensors),
            SMALLEST=smallest,
            LARGEST=largest,
            MIN_SCALE=MIN_INPUT_SCALE,
            INTERPRETED=INTERPRETED,
            **constants,
        )
    return (Codes(out_MC, scales_M1) if isinstance(form, InputRounding) else out_MC), total_MC


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
    total_ptr,
    own_ptr,
    exchange,
    phases_ptr,
    C,
    row_words,
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
    """The row's sum with the residual, float32 that was rounded; this block's part is stored."""
    DTYPE: tl.constexpr = residual_ptr.dtype.element_ty
    part, m = tl.program_id(0), tl.program_id(1)
    branch = None
    if branch_ptr is not None:
        c = tl.arange(0, BLOCK)
        branch = tl.load(branch_ptr + c, mask=c < C, other=0.0)
    if PDL:
        # after what never changes; the rest is the previous kernel's until it ends
        pdl_launch_and_wait()
    counter = phases_ptr + m * tl.num_programs(0) + part
    OF_WORD: tl.constexpr = 32 // SUM.dtype.primitive_bitwidth
    c, w = tl.arange(0, BLOCK), tl.arange(0, BLOCK // OF_WORD)
    mask, words_mask = c < C, w < row_words
    own_words = words_mask & (w // (PART // OF_WORD) == part)
    row = m.to(tl.int64) * C
    phase = tl.load(counter)
    x = load_reduced(x_ptr + row + c, mask, stride_part, SUM)
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
    # as one GPU rounds a product
    x = total.to(DTYPE).to(tl.float32)
    x = changed_branch(x, branch, C, BRANCH_EPS, BRANCH_FACTOR, DTYPE)
    if not EARLY:
        residual = tl.load(residual_ptr + row + c, mask=mask, other=0.0)
    # the model's residual stream is in this dtype, and the norm sees it rounded
    rounded = (x + residual.to(tl.float32)).to(DTYPE)
    tl.store(total_ptr + row + c, rounded, mask=mask & (c // PART == part))
    return rounded.to(tl.float32)


@triton.jit(do_not_specialize=["rank", "spin_limit"])
def _all_reduce_norm(
    x_ptr,  # [M, C], or parts of it (split_k_triton.py)
    stride_part,
    residual_ptr,  # [M, C]
    weight_ptr,  # [C] or None: the sum alone
    branch_ptr,  # [C] or None
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
    if EARLY and weight_ptr is not None:
        weight = tl.load(weight_ptr + c, mask=c < C, other=0.0)
    x = _total(
        x_ptr,
        stride_part,
        residual_ptr,
        branch_ptr,
        total_ptr,
        own_ptr,
        exchange,
        phases_ptr,
        C,
        row_words,
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
    if weight_ptr is None:
        y = x.to(DTYPE)
    else:
        if not EARLY:
            weight = tl.load(weight_ptr + c, mask=c < C, other=0.0)
        y = weighted(x * tl.rsqrt(tl.sum(x * x, 0) / C + eps), weight, DTYPE)
    mine = (c < C) & (c // PART == part)
    place = m.to(tl.int64) * C + c
    if scales_ptr is not None:
        DYNAMIC: tl.constexpr = scale_ptr is None
        scale = scale_of_chunks((y,), LARGEST, MIN_SCALE) if DYNAMIC else tl.load(scale_ptr)
        CODE: tl.constexpr = out_ptr.dtype.element_ty
        codes = encode(y, scale, SMALLEST, LARGEST, CODE, DYNAMIC, INTERPRETED)
        tl.store(out_ptr + place, codes, mask=mine)
        # all blocks of a row have the same
        tl.store(scales_ptr + m, scale)
    elif out_ptr is not None:
        tl.store(out_ptr + place, y, mask=mine)


@triton.jit(do_not_specialize=["rank", "spin_limit", "M"])
def _all_reduce_norm_limbs(
    x_ptr,
    stride_part,
    residual_ptr,
    weight_ptr,
    branch_ptr,
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
    """As _all_reduce_norm; the 8 steps of a part, or those of the whole row, become limbs."""
    DTYPE: tl.constexpr = residual_ptr.dtype.element_ty
    STEPS: tl.constexpr = 8
    part, m = tl.program_id(0), tl.program_id(1)
    steps, first = C // 128, part * STEPS
    slots = slots_of_peers(bases_ptr, stride_slot, rank, RANKS)
    exchange = Exchange(slots, stride_slot, rank, Wait(spin_limit, broken_ptr, report_ptr))
    if weight_ptr is not None:
        weight = load_steps(weight_ptr, first, steps, STEPS, FORM)
    x = _total(
        x_ptr,
        stride_part,
        residual_ptr,
        branch_ptr,
        total_ptr,
        own_ptr,
        exchange,
        phases_ptr,
        C,
        row_words,
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
    # the part comes back from memory in the order of words
    tl.debug_barrier()
    y = load_steps(total_ptr + m.to(tl.int64) * C, first, steps, STEPS, FORM)
    if weight_ptr is not None:
        factor = tl.rsqrt(tl.sum(x * x, 0) / C + eps)
        y = weighted(y.to(tl.float32) * factor, weight, DTYPE)
    store_limbs(y, words_ptr, scales_ptr, sums_ptr, m, first, M, steps, FORM)
