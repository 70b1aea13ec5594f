"""What adapters add to a product, scale * B h, as a kernel that adds it itself takes it.

Such a kernel starts its sums with them (sm90_term.py), which saves the launch of lora_expand_.
Legend as in weights.py; P parts of h.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from qkernels.lora.weights import LoraWeights

TILE_OUTPUTS = 64  # that such a kernel reads of one B


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraTerm:
    """h as parts, which the product adds in order, and what else it reads."""

    h_PTSR: torch.Tensor  # float32, what lora_shrink makes
    slots_T: torch.Tensor
    weights: LoraWeights


def tiles_fault(sizes: Sequence[int]) -> str | None:
    """Why no product can add the adapters of linears of these sizes; None: one can.

    A tile of outputs belongs to one linear of those that stand side by side.
    """
    if any(end % TILE_OUTPUTS for end in accumulate(sizes[:-1])):
        return f"adapters of linears that end within {TILE_OUTPUTS} outputs, {list(sizes)}"
    return None


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
