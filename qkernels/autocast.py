"""Autocast around operations that state their own dtypes."""

import torch


def no_autocast(tensor: torch.Tensor) -> torch.autocast:
    """Disable autocast: exact integer sums and float32 scales must not run in its dtype."""
    return torch.autocast(tensor.device.type, enabled=False)


def is_autocast(x: torch.Tensor) -> bool:
    """Return True if autocast is enabled on x's device."""
    return torch.is_autocast_enabled(x.device.type)


def autocast_input(x: torch.Tensor) -> torch.Tensor:
    """Return x in the dtype that autocast gives the inputs of a linear; x itself without it."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if is_autocast(x) else x
