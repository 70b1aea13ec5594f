"""Prepacked weight of the W4A8 kernels, as tensors. Legend: N outputs, K inputs, G groups."""

import torch

from formats.in_memory.packed import PackedWeight
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
) -> PreparedWeight:
    """Prepack codes as `packed` [N/64, K/block_k, 64, block_k/2], with their scales.

    Scales of groups are [N/64, G, 64] in the checkpoint's dtype. One scale per output is float32
    [N], divided by the factor of codes, which is a power of two.
    """
    packed = packed if device is None else packed.to(device)
    tensors = prepacked_tensors(packed, block_k)
    workspace(packed.device)
    return PreparedWeight.of(packed, kernel=kernel, tensors=tensors, dtype=dtype, rounds_input=True)


def prepacked_tensors(packed: PackedWeight, block_k: int) -> dict[str, torch.Tensor]:
    """Return the tensors of `prepacked`."""
    type = packed.activation.type
    if packed.scales_NG.shape[1] == 1:
        scales = (packed.scales_NG.float() / code_factor(type)).flatten().contiguous()
    else:
        scales = tiles_of_scales(packed.scales_NG)
    return {"packed": tiles_of_codes(packed.codes(), type, block_k), "scales": scales}
