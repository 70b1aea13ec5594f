"""Scratch memory of split-K products: one buffer a device, at a fixed address."""

import functools

import torch

# Partial sums of all splits: 16 MiB of float32, allocated once for each device.
WORKSPACE_FLOATS = 2**22
WORKSPACE_COUNTERS = 4096  # output tiles that may be split


@functools.cache
def workspace(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial sums and counters of split products, one pair for each device, kept for good.

    A fixed size and place, so that captured CUDA graphs stay valid. Products on one device must
    follow each other, on one stream. A kernel leaves every counter at zero.
    """
    partials = torch.empty(WORKSPACE_FLOATS, dtype=torch.float32, device=device)
    return partials, torch.zeros(WORKSPACE_COUNTERS, dtype=torch.int32, device=device)
