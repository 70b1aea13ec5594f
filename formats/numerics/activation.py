"""Rounding of a linear's input to 8 bits: the checks and the arithmetic.

Legend: M rows of x, K inputs, S scales of a row.
"""

from typing import Protocol

import torch

from formats.errors import CheckpointError
from formats.scheme import FP8_MAX, ActivationSpec

# Smallest scale: an all-zero row gets zero codes without a division by zero.
MIN_INPUT_SCALE = 1e-10


# activation type -> largest code
LARGEST = {"int": 127.0, "float": FP8_MAX}


class HasActivation(Protocol):
    """Weight that states how its input is rounded."""

    activation: ActivationSpec | None
    input_scale: torch.Tensor | None


def check_input_scale(
    spec: ActivationSpec | None, scale: torch.Tensor | None, name: str = "weight"
) -> None:
    """Raise CheckpointError unless a static activation has a usable scale, and others have none."""
    wanted = spec is not None and not spec.dynamic
    if (scale is not None) != wanted:
        found = "is missing" if wanted else "has no meaning in this scheme"
        raise CheckpointError(
            f"{name}.input_scale",
            found,
            "download the weights and config.json again, or calibrate again",
        )
    if scale is not None and (
        scale.numel() != 1 or not torch.isfinite(scale).all() or not (scale > 0).all()
    ):
        raise CheckpointError(
            f"{name}.input_scale",
            f"expected one finite number above 0, found {scale.flatten()[:4].tolist()}",
            "calibrate again",
        )


def one_scale(stored: torch.Tensor, name: str) -> torch.Tensor:
    """Return a scale of a file as float32 []. Raises CheckpointError unless it is one float."""
    if stored.numel() != 1 or not stored.is_floating_point():
        raise CheckpointError(
            name,
            f"expected one floating point number, found {stored.dtype} {list(stored.shape)}",
            "copy the tensor from the original checkpoint, or store it in float32",
        )
    return stored.float().reshape(())


def same_activation(left: HasActivation, right: HasActivation) -> bool:
    """Return True if both linears round the same input to the same codes."""
    if left.activation != right.activation:
        return False
    if left.input_scale is None or right.input_scale is None:
        return left.input_scale is right.input_scale
    return bool((left.input_scale == right.input_scale).all())


def describe_scale(weight: HasActivation) -> str:
    """Describe, for an error, the static scale of the input or its dynamic rounding."""
    if weight.input_scale is None:
        return str(weight.activation)
    return f"scaled by {float(weight.input_scale):.6g}"


def quantize_input(
    x: torch.Tensor, spec: ActivationSpec, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round x [M, K] to codes [M, K] (int8 or float8_e4m3fn) and float32 scales [M, S].

    A dynamic scale is the largest magnitude over the largest code; rounding is half to even.
    """
    x = x.float()
    largest = LARGEST[spec.type]
    if not spec.dynamic:
        scales_MS = scale.to(x.device, torch.float32).reshape(1, 1).expand(x.shape[0], 1)
    else:
        groups = 1
        if spec.per == "group":
            groups = -(-x.shape[1] // spec.group_size)
            width = groups * spec.group_size
            x = torch.nn.functional.pad(x, (0, width - x.shape[1]))
        scales_MS = x.unflatten(1, (groups, -1)).abs().amax(-1)
        if spec.per == "tensor":
            scales_MS = scales_MS.amax().expand_as(scales_MS)
        # divide by a tensor: a GPU would replace division by a Python number by a product with the
        # inverse, which differs in the last bit
        scales_MS = (scales_MS / torch.full_like(scales_MS, largest)).clamp(min=MIN_INPUT_SCALE)
    groups_MSG = x.unflatten(1, (scales_MS.shape[1], -1))
    return to_codes(groups_MSG, scales_MS[..., None], spec.type).flatten(1), scales_MS


def to_codes(x: torch.Tensor, scales: torch.Tensor, type: str) -> torch.Tensor:
    """Round float32 x / scales, half to even, to int8 ("int") or float8_e4m3fn ("float")."""
    codes = x / scales
    if type == "int":
        return codes.round_().clamp_(-128, 127).to(torch.int8)
    return codes.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
