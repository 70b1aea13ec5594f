"""The split-K workspace: one buffer for each device, at a fixed address."""

import functools

import torch

# partial sums of all splits: 16 MiB of float32
WORKSPACE_FLOATS = 2**22
WORKSPACE_COUNTERS = 4096  # output tiles that may be split


@functools.cache
def workspace(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial sums and counters of split-K kernels, allocated once for each device.

    Size and address never change, so captured CUDA graphs stay valid. Kernels that use it must run
    one after another, on one stream, and leave every counter at zero.
    """
    partials = torch.empty(WORKSPACE_FLOATS, dtype=torch.float32, device=device)
    return partials, torch.zeros(WORKSPACE_COUNTERS, dtype=torch.int32, device=device)
