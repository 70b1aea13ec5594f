"""LoRA operations: each checks its arguments, then runs a kernel. Legend: see weights.py.

`lora_shrink` reads the input of a linear, before its product. `lora_expand_` adds to its result.
"""

import torch

from qkernels import dispatch
from qkernels.checks import check_float, check_tensor
from qkernels.errors import KernelError
from qkernels.lora import rows
from qkernels.lora.config import MAX_SLICES
from qkernels.lora.term import LoraTerm
from qkernels.lora.weights import LoraWeights
from qkernels.operands.split_k import LinearOutput
from qkernels.problem import FLOAT_DTYPES


def lora_shrink(
    x_TK: torch.Tensor, slots_T: torch.Tensor, weights: LoraWeights, kernel: str | None = None
) -> torch.Tensor:
    """Return A x for each row's adapter, float32 [T, S, R].

    `slots_T` is int32: the adapter slot of each row, or -1 for no adapter. Results of rows without
    an adapter are undefined. `kernel` requests a row of lora/rows.py.
    """
    return _shrink(rows.SHRINK, x_TK, slots_T, weights, kernel)


def lora_term(
    x_TK: torch.Tensor, slots_T: torch.Tensor, weights: LoraWeights, kernel: str | None = None
) -> LoraTerm:
    """Return the LoRA term for a `linear` whose plan adds adapters (`adds_adapters`).

    As `lora_shrink`, but A x may be partial sums that the product adds.
    """
    h_PTSR = _shrink(rows.SHRINK_PARTS, x_TK, slots_T, weights, kernel)
    return LoraTerm(h_PTSR=h_PTSR, slots_T=slots_T, weights=weights)


def _shrink(
    operation: dispatch.Operation,
    x_TK: torch.Tensor,
    slots_T: torch.Tensor,
    weights: LoraWeights,
    kernel: str | None,
) -> torch.Tensor:
    op = operation.name
    check_float(f"{op} x", x_TK)
    check_tensor(
        f"{op} x", x_TK, (None, weights.in_features), (weights.a_LRSK.dtype,), weights.a_LRSK
    )
    _check_slots(f"{op} slots", slots_T, x_TK.shape[0], x_TK)
    if weights.num_slices > MAX_SLICES:
        raise KernelError(
            op,
            f"expected at most {MAX_SLICES} linears, found {weights.num_slices}",
            "split the projection",
        )
    x_TK = x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()
    run = dispatch.implementation(
        operation, device=x_TK.device.type, dtype=x_TK.dtype, requested=kernel
    )
    return run(x_TK, slots_T, weights)


def lora_expand_(
    y_TN: LinearOutput,
    h_TSR: torch.Tensor,
    slots_T: torch.Tensor,
    weights: LoraWeights,
    kernel: str | None = None,
) -> None:
    """Add scale * B h to the rows of y [T, N] that have an adapter.

    If y is split-K partial sums, the first one is changed. `h_TSR` is the result of `lora_shrink`
    for the same slots. `kernel` requests a row of lora/rows.py.
    """
    check_float("lora_expand_ y", y_TN, parts=True)
    T = y_TN.shape[0]
    check_tensor("lora_expand_ y", y_TN, (T, weights.out_features), FLOAT_DTYPES, weights.b_LRN)
    of_rows = (T, weights.num_slices, weights.max_rank)
    check_tensor("lora_expand_ h", h_TSR, of_rows, (torch.float32,), weights.b_LRN)
    _check_slots("lora_expand_ slots", slots_T, T, h_TSR)
    run = dispatch.implementation(
        rows.EXPAND, device=h_TSR.device.type, dtype=y_TN.dtype, requested=kernel
    )
    run(y_TN, h_TSR, slots_T, weights)


def _check_slots(name: str, slots_T: torch.Tensor, T: int, like: torch.Tensor) -> None:
    check_tensor(name, slots_T, (T,), (torch.int32,), like)
