"""Token ids as channels of hidden states, exact in every dtype.

A token id is stored in 4 channels of 6 bits each, divided by 64.
"""

import torch

DIGITS, BASE = 4, 64


def as_channels(ids: torch.Tensor) -> torch.Tensor:
    """Return token ids [...] as channels [..., DIGITS]."""
    return torch.stack([ids // BASE**i % BASE for i in range(DIGITS)], -1) / BASE


def from_channels(channels: torch.Tensor) -> torch.Tensor:
    """Return the token ids [...] of channels [..., DIGITS]."""
    digits = (channels[..., :DIGITS].detach() * BASE).round().long()
    return sum(digits[..., i] * BASE**i for i in range(DIGITS))
