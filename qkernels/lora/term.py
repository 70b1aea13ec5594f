"""The LoRA term of a product, scale * B h, for kernels that add it themselves.

Such a kernel adds the term to its sums (sm90_term.py) and saves the launch of lora_expand_. Legend:
see weights.py; P partial sums of h.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from qkernels.checks import check_tensor
from qkernels.lora.config import whole_blocks
from qkernels.lora.weights import LoraWeights

TILE_OUTPUTS = 64  # outputs of a tile, for which such a kernel reads one B


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraTerm:
    """Partial sums of h = A x, which the product adds in order, and each row's slot and adapter."""

    h_PTSR: torch.Tensor  # float32, result of lora_shrink_parts
    slots_T: torch.Tensor
    weights: LoraWeights


def tiles_fault(sizes: Sequence[int]) -> str | None:
    """Return why no product can add adapters to fused linears of these sizes; None: one can.

    An output tile must lie within one of the fused linears.
    """
    if any(size % TILE_OUTPUTS for size in sizes):
        return f"takes linears of outputs divisible by {TILE_OUTPUTS}, not {list(sizes)}"
    return None


def check_term(name: str, term: LoraTerm, M: int, N: int, dtype: torch.dtype) -> None:
    """Raise KernelError unless the term fits a product of M rows and N outputs."""
    weights = term.weights
    of_rows = (M, weights.num_slices, whole_blocks(weights.max_rank))
    check_tensor(f"{name} h", term.h_PTSR, (None, *of_rows), (torch.float32,), weights.b_LRN)
    check_tensor(f"{name} slots", term.slots_T, (M,), (torch.int32,), term.h_PTSR)
    check_tensor(f"{name} B", weights.b_LRN, (None, None, N), (dtype,), term.h_PTSR)


class TermArguments(NamedTuple):
    """The argument of a kernel that adds a term (sm90_term.py).

    All fields are None without a term.
    """

    h_ptr: torch.Tensor | None  # float32 [P, T, S, R]
    slots_ptr: torch.Tensor | None  # int32 [T]
    b_ptr: torch.Tensor | None  # [L, R, N]
    ranks_ptr: torch.Tensor | None  # int32 [L, 4]
    scales_ptr: torch.Tensor | None  # float32 [L, 4]
    S: int | None
    R: int | None
    b_slot_stride: int | None
    b_rank_stride: int | None
    ranks_stride: int | None
    scales_stride: int | None
    first_end: int | None  # outputs of the first fused linear
    second_end: int | None  # outputs of the first two fused linears
    third_end: int | None  # outputs of the first three fused linears


def term_arguments(term: LoraTerm | None) -> TermArguments:
    """Return the kernel argument for `term`."""
    if term is None:
        return _NO_TERM
    weights, (_, _, S, R) = term.weights, term.h_PTSR.shape
    first, second, third, *_ = (*accumulate(weights.sizes), *(weights.out_features,) * 2)
    return TermArguments(
        h_ptr=term.h_PTSR,
        slots_ptr=term.slots_T,
        b_ptr=weights.b_LRN,
        ranks_ptr=weights.ranks_LS,
        scales_ptr=weights.scales_LS,
        S=S,
        R=R,
        b_slot_stride=weights.b_LRN.stride(0),
        b_rank_stride=weights.b_LRN.stride(1),
        ranks_stride=weights.ranks_LS.stride(0),
        scales_stride=weights.scales_LS.stride(0),
        first_end=first,
        second_end=second,
        third_end=third,
    )


_NO_TERM = TermArguments(*(None,) * len(TermArguments._fields))


def term_parts(term: LoraTerm | None) -> int:
    """Return the number of partial sums of h, a kernel constant. 0: there is no term."""
    return 0 if term is None else term.h_PTSR.shape[0]
