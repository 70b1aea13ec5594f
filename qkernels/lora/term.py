"""What adapters add to a product, scale * B h, as a kernel that adds it itself takes it.

Such a kernel starts its sums with them (sm90_term.py), which saves the launch of lora_expand_.
Legend as in weights.py; P parts of h.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from qkernels.checks import check_tensor
from qkernels.lora.config import whole_blocks
from qkernels.lora.weights import LoraWeights

TILE_OUTPUTS = 64  # that such a kernel reads of one B


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraTerm:
    """h as parts, which the product adds in order, and what else it reads."""

    h_PTSR: torch.Tensor  # float32, what lora_shrink makes
    slots_T: torch.Tensor
    weights: LoraWeights


def tiles_fault(sizes: Sequence[int]) -> str | None:
    """Why no product adds the adapters of linears of so many outputs; None: one can.

    A tile of outputs belongs to one linear of those that stand side by side.
    """
    if any(size % TILE_OUTPUTS for size in sizes):
        return f"takes linears of outputs divisible by {TILE_OUTPUTS}, not {list(sizes)}"
    return None


def check_term(name: str, term: LoraTerm, M: int, N: int, dtype: torch.dtype) -> None:
    """Raise KernelError unless a product of M rows and N outputs can add it."""
    weights = term.weights
    of_rows = (M, weights.num_slices, whole_blocks(weights.max_rank))
    check_tensor(f"{name} h", term.h_PTSR, (None, *of_rows), (torch.float32,), weights.b_LRN)
    check_tensor(f"{name} slots", term.slots_T, (M,), (torch.int32,), term.h_PTSR)
    check_tensor(f"{name} B", weights.b_LRN, (None, None, N), (dtype,), term.h_PTSR)


def term_arguments(term: LoraTerm | None) -> tuple:
    """The arguments of a kernel for it, in the order of sm90_term.py's `LoraTermArguments`."""
    if term is None:
        return (None,) * 13
    weights, (_, _, S, R) = term.weights, term.h_PTSR.shape
    first, second, _ = (*accumulate(weights.sizes), *(weights.out_features,) * 2)[:3]
    return (
        term.h_PTSR,
        term.slots_T,
        weights.b_LRN,
        weights.ranks_LS,
        weights.scales_LS,
        S,
        R,
        weights.b_LRN.stride(0),
        weights.b_LRN.stride(1),
        weights.ranks_LS.stride(0),
        weights.scales_LS.stride(0),
        first,
        second,
    )


def term_parts(term: LoraTerm | None) -> int:
    """A constant of such a kernel; 0: there is no term."""
    return 0 if term is None else term.h_PTSR.shape[0]
