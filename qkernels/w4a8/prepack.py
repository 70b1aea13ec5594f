"""Prepacked weight of the W4A8 kernels, as tensors. Legend: N outputs, K inputs, G groups."""

import torch

from formats.in_memory.packed import PackedWeight
from formats.numerics.multiples import find_multiples
from qkernels.gpu.workspace import workspace
from qkernels.linear.prepared import PreparedWeight
from qkernels.w4a8.layout import code_factor, tiles_of_codes, tiles_of_scales


def prepacked(
    packed: PackedWeight,
    dtype: torch.dtype,
    device: torch.device | str | None,
    *,
    kernel: str,
    block_k: int,
    multiples: bool = False,
) -> PreparedWeight:
    """Prepack codes as `packed` [N/64, K/block_k, 64, block_k/2], with their scales.

    Scales of groups are [N/64, G, 64] in the checkpoint's dtype. One scale per output is float32
    [N], divided by the factor of codes, which is a power of two. `multiples`: if int8 inputs meet
    scales that are multiples of one number in each row, these are float32 `scales` [N] and int16
    `multiples` [N/64, G, 64].
    """
    packed = packed if device is None else packed.to(device)
    tensors = prepacked_tensors(packed, block_k, multiples)
    workspace(packed.device)
    return PreparedWeight.of(packed, kernel=kernel, tensors=tensors, dtype=dtype, rounds_input=True)


def prepacked_tensors(
    packed: PackedWeight, block_k: int, multiples: bool = False
) -> dict[str, torch.Tensor]:
    """Return the tensors of `prepacked`."""
    type = packed.activation.type
    codes = {"packed": tiles_of_codes(packed.codes(), type, block_k)}
    multiples = multiples and packed.scheme.sums_integers and packed.scales_NG.shape[1] > 1
    found = find_multiples(packed.scales_NG) if multiples else None
    if found is not None:
        units_N1, multiples_NG = found
        tiles = tiles_of_scales(multiples_NG.to(torch.int16))
        return {**codes, "scales": units_N1.flatten().contiguous(), "multiples": tiles}
    if packed.scales_NG.shape[1] == 1:
        scales = (packed.scales_NG.float() / code_factor(type)).flatten().contiguous()
    else:
        scales = tiles_of_scales(packed.scales_NG)
    return {**codes, "scales": scales}
