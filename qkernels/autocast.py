"""Autocast around operations that state their own dtypes."""

from contextlib import AbstractContextManager, nullcontext

import torch

# Kinds of devices that have autocast. torch.compile of torch 2.11 cannot trace the question.
_KINDS = frozenset(
    kind
    for kind in ("cpu", "cuda", "hpu", "maia", "mps", "mtia", "xla", "xpu")
    if torch.amp.is_autocast_available(kind)
)


def no_autocast(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Disable autocast: exact integer sums and float32 scales must not run in its dtype."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if kind in _KINDS else nullcontext()


def is_autocast(x: torch.Tensor) -> bool:
    """Return True if autocast is enabled on x's device; some, such as meta, have none."""
    kind = x.device.type
    return kind in _KINDS and torch.is_autocast_enabled(kind)


def autocast_input(x: torch.Tensor) -> torch.Tensor:
    """Return x in the dtype that autocast gives the inputs of a linear; x itself without it."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if is_autocast(x) else x
