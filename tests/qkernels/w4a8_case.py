"""Weights and inputs of W4A8 products whose every sum is exact, and what the products should be."""

import torch

from formats.in_memory.packed import PackedWeight
from formats.in_memory.weights import with_activation
from formats.numerics.bits import pack
from formats.scheme import Scheme

FLOAT8 = torch.float8_e4m3fn


def weight_of(codes_NK, scales_NG, name, device) -> PackedWeight:
    """The weight of these codes 0 to 15; N need not be what a file format takes."""
    scheme = Scheme.parse(name)
    packed = PackedWeight(
        words_NW=pack(codes_NK.cpu(), 4),
        scales_NG=scales_NG.cpu(),
        zeros_NG=torch.full(scales_NG.shape, 8, dtype=torch.uint8),
        spec=scheme.weight,
        in_features=codes_NK.shape[1],
    )
    return with_activation(packed, scheme, None).to(device)


def exact_case(name, M, N, K, device, multiples=False):
    """(codes of x, scales of x, weight, float64 result): float32 holds every sum.

    Scales of groups are powers of two that differ from one group and output to the next. With int8
    inputs those of output 0 are no multiples of one number. `multiples`: all scales of an output
    are a random multiple from -15 to 15, but not 0, of one power of two.
    """
    generator = torch.Generator().manual_seed(M + N + K)
    scheme = Scheme.parse(name)
    codes_NK = torch.randint(0, 16, (N, K), dtype=torch.uint8, generator=generator)
    codes_NK[0], codes_NK[-1] = 0, 15
    G = scheme.weight.num_groups(K)
    scales_NG = 2.0 ** torch.randint(-4, 0, (N, G), generator=generator)
    if multiples:
        units_N1 = 2.0 ** torch.randint(-6, -2, (N, 1), generator=generator)
        sizes_NG = torch.randint(1, 16, (N, G), generator=generator)
        sizes_NG[:, 0] = 15
        signs_NG = 2 * torch.randint(0, 2, (N, G), generator=generator) - 1
        scales_NG = units_N1 * sizes_NG * signs_NG
    elif scheme.activation.type == "int" and G > 1:
        scales_NG[0, :2] = torch.tensor([17 / 32, 1 / 32])
    if scheme.activation.type == "int":
        codes_MK = torch.randint(-128, 128, (M, K), dtype=torch.int8, generator=generator)
        codes_MK[0] = -128  # the largest sums that there are
    else:  # few bits: a tensor core's sum of 128 products is exact
        codes_MK = torch.randint(-3, 4, (M, K), generator=generator).to(torch.float32).to(FLOAT8)
    scales_M1 = 2.0 ** torch.randint(-9, -6, (M, 1), generator=generator)
    packed = weight_of(codes_NK, scales_NG, name, device)
    signed_NK = (codes_NK.double() - 8).unflatten(1, (G, -1)) * scales_NG.double()[..., None]
    want = codes_MK.to(torch.float64) @ signed_NK.flatten(1).t()
    if multiples:
        want = (want / units_N1.double().t()).float() * units_N1.double().t()
    want = want * scales_M1.double()
    return codes_MK.to(device), scales_M1.to(device), packed, want
