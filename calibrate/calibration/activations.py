"""Simulated activation quantization, in floating point: for searches and evaluation."""

import torch


def fake_quantize_tokens(x: torch.Tensor, bits: int = 8) -> torch.Tensor:
    """Round each token's vector [..., K] to its own symmetric grid, and dequantize it."""
    largest = 2 ** (bits - 1) - 1
    step = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / largest
    return ((x.float() / step).round_().clamp_(-largest, largest) * step).to(x.dtype)
