"""Plain torch conversion of inputs to limbs (limbs.py) and back, bit-exact with the kernels."""

from dataclasses import replace

import torch

from qkernels.operands.limbs import (
    K_STEP,
    LIMBS_OF_INPUT,
    LimbForm,
    Limbs,
    empty_limbs,
)


def inputs_of_words(bits: int) -> torch.Tensor:
    """Return the input index within a K step of each byte b of word (i, w, t).

    The result is int64 [2 i, 4 w, 4 t, 4 b].
    """
    i, w, t, b = torch.meshgrid(*(torch.arange(size) for size in (2, 4, 4, 4)), indexing="ij")
    if bits == 4:
        return 64 * i + 32 * (w // 2) + 8 * (w % 2) + 2 * t + 16 * (b % 2) + b // 2
    return 64 * (t % 2) + 16 * w + 4 * i + 2 * (t // 2) + 8 * (b % 2) + b // 2


def to_limbs(x_MK: torch.Tensor, form: LimbForm) -> Limbs:
    """Reference of ops.to_limbs."""
    M, K = x_MK.shape
    limbs = empty_limbs(form, M, K, x_MK.device)
    if form.with_tensor:
        limbs = replace(limbs, tensor=x_MK)
    x_MS = x_MK.float().view(M, -1, K_STEP)
    exponents = (x_MS.abs().view(torch.int32).amax(2) >> 23).clamp(min=40)
    factors = ((283 - exponents) << 23).view(torch.float32)
    scales = ((exponents - 29) << 23).view(torch.float32)
    scales = scales.masked_fill(exponents == 255, float("nan"))
    integers = (x_MS * factors[:, :, None]).to(torch.int32)
    balanced = (integers + 0x00808080) ^ 0x00808080
    bytes_DMS = torch.stack([balanced >> 8 * d & 255 for d in range(LIMBS_OF_INPUT)])
    bytes_DMS = bytes_DMS[..., inputs_of_words(form.bits).to(x_MK.device)].to(torch.uint8)
    words = bytes_DMS.contiguous().view(torch.int32)[..., 0]  # [D, M, S, i, w, t]
    sums = bytes_DMS.view(torch.int8).sum((3, 4, 5, 6), dtype=torch.int32)  # [D, M, S]
    for m in range(M):
        own = slice(4 * m % 8, 4 * m % 8 + 4)
        limbs.words[:, m // 2, :, own] = words[:, m].permute(1, 2, 0, 4, 3)
        powers = 256.0 ** torch.arange(LIMBS_OF_INPUT, device=x_MK.device)
        limbs.scales[:, m // 2, own] = scales[m, :, None] * powers
        if form.with_sums:
            limbs.sums[:, m // 2, own] = sums[:, m].t()
    return limbs


def from_limbs(limbs: Limbs) -> torch.Tensor:
    """Return the inputs [M, K] that the limbs represent.

    The result is float64, because float32 cannot hold 31 bits.
    """
    M, form = limbs.num_rows, limbs.form
    data = limbs.words.view(torch.int8)  # [S, T, i, 8, t, w b]
    data = data.unflatten(5, (4, 4)).unflatten(3, (2, LIMBS_OF_INPUT))
    data = data.permute(1, 3, 0, 4, 2, 6, 5, 7).flatten(0, 1)[:M]
    scales = limbs.scales.unflatten(2, (2, LIMBS_OF_INPUT))[..., 0]
    scales = scales.permute(1, 2, 0).flatten(0, 1)[:M].double()
    powers = 256.0 ** torch.arange(LIMBS_OF_INPUT, device=data.device, dtype=torch.float64)
    values = (
        torch.einsum("msdiwtb,d->msiwtb", data.double(), powers)
        * scales[..., None, None, None, None]
    )
    x_MS = torch.empty_like(values.flatten(2))
    x_MS[..., inputs_of_words(form.bits).flatten().to(data.device)] = values.flatten(2)
    return x_MS.flatten(1)
