"""Random weights in 4-bit floats, for the tests of their kernels."""

import torch

from formats.in_memory.fp4 import Fp4Weight
from formats.scheme import Scheme

KINDS = ("mxfp4", "nvfp4")


def random_fp4(kind: str, N: int, K: int, std: float = 0.02, spread: float = 4) -> Fp4Weight:
    """Normal weights times a power of two up to 2^spread for each group of inputs."""
    spec = Scheme.parse(f"w4a16-{kind}").weight
    generator = torch.Generator().manual_seed(N + K)
    weight_NK = torch.randn(N, K, generator=generator) * std
    factors_NG = 2 ** (spread * torch.rand(N, K // spec.group_size, generator=generator))
    weight_NK *= factors_NG.repeat_interleave(spec.group_size, 1)
    return Fp4Weight.from_float(weight_NK, spec)
