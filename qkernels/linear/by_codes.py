"""A product whose input is rounded to 8-bit codes first. Knows no kernel."""

from collections.abc import Callable

import torch

from qkernels.linear.prepared import PreparedWeight


def linear_by_codes(
    x: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None,
    quantize_input: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    linear_codes: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """x [..., K] to [..., N] of a weight with 8-bit activations: rounded to codes, multiplied."""
    codes_MK, scales_MS = quantize_input(
        x.reshape(-1, weight.in_features), weight.activation, weight.tensors.get("input_scale")
    )
    return linear_codes(codes_MK, scales_MS, weight, bias).view(*x.shape[:-1], weight.out_features)
