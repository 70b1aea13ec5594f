"""Batch-invariant LoRA operations: a row's bits depend only on the row and its adapter.

On a GPU one compiled kernel runs for every number of rows, with tiles of 16 rows and the same parts
of K. Products never add the term themselves, because such products do not exist for every number of
rows. On a CPU each row is computed alone. Legend: see weights.py.
"""

import torch

from qkernels.gpu import device as gpu_device
from qkernels.lora import reference
from qkernels.lora.config import fixed_expand_config, fixed_shrink_config
from qkernels.lora.weights import LoraWeights
from qkernels.operands.split_k import LinearOutput, SplitKPartials


def lora_shrink(x_TK: torch.Tensor, slots_T: torch.Tensor, weights: LoraWeights) -> torch.Tensor:
    """Implement ops.lora_shrink; on a GPU, rows without an adapter are undefined."""
    if gpu_device.arch(x_TK.device) == "cpu":
        rows = zip(x_TK.split(1), slots_T.split(1), strict=True)
        return torch.cat([reference.lora_shrink(x.clone(), slot, weights) for x, slot in rows])
    from qkernels.lora import triton_lora

    T, K = x_TK.shape
    sizes = weights.num_slices, weights.max_rank, weights.num_slots
    return triton_lora.lora_shrink(x_TK, slots_T, weights, fixed_shrink_config(T, K, *sizes))


def lora_expand_(
    y_TN: LinearOutput, h_TSR: torch.Tensor, slots_T: torch.Tensor, weights: LoraWeights
) -> None:
    """Implement ops.lora_expand_."""
    if gpu_device.arch(h_TSR.device) == "cpu":
        out_TN = y_TN.parts[0] if isinstance(y_TN, SplitKPartials) else y_TN
        for y, h, slot in zip(out_TN.split(1), h_TSR.split(1), slots_T.split(1), strict=True):
            reference.lora_expand_(y, h.clone(), slot, weights)
        return
    from qkernels.lora import triton_lora

    config = fixed_expand_config(h_TSR.shape[0], weights.out_features, weights.num_slots)
    triton_lora.lora_expand_(y_TN, h_TSR, slots_T, weights, config)
