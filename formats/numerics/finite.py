"""Checks of float weights before they are rounded."""

import torch

from formats.errors import CheckpointError

BLOCK_NUMBERS = 1 << 24  # checked together, to save memory
REMEDY = "replace these values, or get an intact copy of the model"


def check_finite(name: str, tensor: torch.Tensor, remedy: str = REMEDY) -> None:
    """Raise CheckpointError, naming the tensor and the first place, on NaN or infinity."""
    rows = max(1, BLOCK_NUMBERS * len(tensor) // max(1, tensor.numel())) if tensor.ndim else 1
    blocks = tensor.split(rows) if tensor.ndim else [tensor]
    if all(torch.isfinite(block).all() for block in blocks):
        return
    wrong = ~torch.isfinite(tensor)
    first = torch.unravel_index(wrong.flatten().int().argmax(), wrong.shape)
    raise CheckpointError(
        name,
        f"contains NaN or infinity: {int(wrong.sum())} of {tensor.numel()} values, the first at"
        f" {[int(index) for index in first]}",
        remedy,
    )


def check_matrix(name: str, weight_NK: torch.Tensor) -> None:
    """Raise CheckpointError unless the tensor is a float weight [N, K] with elements."""
    shape = list(weight_NK.shape)
    if weight_NK.ndim != 2 or not weight_NK.is_floating_point():
        found = f"expected a float weight [N, K], found {weight_NK.dtype} {shape}"
        remedy = "give the weight of a linear, as it is before it is quantized"
        raise CheckpointError(name, found, remedy)
    if not weight_NK.numel():
        raise CheckpointError(name, f"is empty: {shape}", "leave this linear out")
