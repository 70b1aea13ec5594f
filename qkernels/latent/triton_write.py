"""Write latents to their pages after norm and RoPE, optionally in 8 bits, in Triton.

Values are rounded at the same points as in reference.py. Legend: see latent/ops.py.
"""

import torch
import triton
import triton.language as tl

from formats.numerics.activation import MIN_INPUT_SCALE
from qkernels.gpu.config import power_of_two
from qkernels.gpu.device import INTERPRETED
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl import pdl_launch_and_wait, pdl_options
from qkernels.latent.cache import PagedLatents
from qkernels.operands.codes_triton import CODE_RANGE, encode, magnitude_bits, scale_of
from qkernels.rowwise.arithmetic_triton import normalized, row_statistics


def rope_write_latents_(
    q_THR: torch.Tensor,
    made_TE: torch.Tensor,
    norm_L: torch.Tensor,
    cos_sin: torch.Tensor,
    positions_T: torch.Tensor,
    cache: PagedLatents,
    slots_T: torch.Tensor,
    *,
    eps: float,
    interleaved: bool = False,
) -> torch.Tensor:
    """Implement ops.rope_write_latents_, with one program per head and one for the entry."""
    (T, H, R), E = q_THR.shape, made_TE.shape[1]
    q_THR = q_THR if q_THR.stride(2) == 1 else q_THR.contiguous()
    made_TE = made_TE if made_TE.stride(1) == 1 else made_TE.contiguous()
    q_out_THE = q_THR.new_empty((T, H, E))
    if T == 0:
        return q_out_THE
    smallest, largest = CODE_RANGE.get(cache.pages.dtype, (0.0, 0.0))
    with on_device(made_TE):
        launch(
            _rope_write_latents,
            (T, H + 1),
            q_THR,
            made_TE,
            norm_L.contiguous(),
            cos_sin.contiguous(),
            positions_T.contiguous(),
            slots_T.contiguous(),
            cache.pages,
            cache.scales,
            q_out_THE,
            *q_THR.stride()[:2],
            made_TE.stride(0),
            eps,
            H=H,
            L=E - R,
            R=R,
            PADDED_L=power_of_two(E - R),
            PADDED_R=power_of_two(R),
            INTERLEAVED=interleaved,
            SMALLEST=smallest,
            LARGEST=largest,
            MIN_SCALE=MIN_INPUT_SCALE,
            INTERPRETED=INTERPRETED,
            num_warps=4,
            **pdl_options(made_TE, T),
        )
    return q_out_THE


@triton.jit
def _rope_write_latents(
    q_ptr,  # [T, H, R]
    made_ptr,  # [T, L + R]
    norm_ptr,  # [L]
    cos_sin_ptr,  # [max position, R]
    positions_ptr,  # [T]
    slots_ptr,  # [T]
    pages_ptr,  # [P, B, L + R], by slot
    scales_ptr,  # [P, B, 2] with 8-bit pages, else None
    q_out_ptr,  # [T, H, L + R]; this kernel writes the last R
    stride_qt,
    stride_qh,
    stride_made,
    eps,
    H: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    PADDED_L: tl.constexpr,
    PADDED_R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        pdl_launch_and_wait()
    position = tl.load(positions_ptr + token).to(tl.int64)
    table_ptr = cos_sin_ptr + position * R
    r = tl.arange(0, PADDED_R)
    if head < H:
        row_ptr = q_ptr + token * stride_qt + head * stride_qh
        out_ptr = q_out_ptr + (token * H + head) * (L + R) + L
        tl.store(out_ptr + r, _rotated(row_ptr, table_ptr, r, R, INTERLEAVED), mask=r < R)
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        if slot >= 0:
            made_row_ptr = made_ptr + token * stride_made
            entry_ptr = pages_ptr + slot * (L + R)
            c = tl.arange(0, PADDED_L)
            x = tl.load(made_row_ptr + c, mask=c < L, other=0.0)
            weight = tl.load(norm_ptr + c, mask=c < L, other=0.0)
            wide = x.to(tl.float32)
            mean, inverse = row_statistics(wide, c < L, L, eps, "rms")
            normed = normalized(wide, mean, inverse, weight, None, "rms", x.dtype)
            key = _rotated(made_row_ptr + L, table_ptr, r, R, INTERLEAVED)
            if scales_ptr is not None:
                CODE: tl.constexpr = pages_ptr.dtype.element_ty
                of_entry = scales_ptr + slot * 2 + tl.arange(0, 1)
                normed = _encoded(normed, of_entry, SMALLEST, LARGEST, MIN_SCALE, CODE, INTERPRETED)
                key = _encoded(key, of_entry + 1, SMALLEST, LARGEST, MIN_SCALE, CODE, INTERPRETED)
            tl.store(entry_ptr + c, normed, mask=c < L)
            tl.store(entry_ptr + L + r, key, mask=r < R)


@triton.jit
def _encoded(
    x,  # [N]
    scales,  # [1] pointers
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    CODE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Convert a row to codes and store its scale."""
    x_1N = x.to(tl.float32)[None, :]
    scale = scale_of(magnitude_bits(x_1N), LARGEST, MIN_SCALE)
    tl.store(scales, scale)
    codes = encode(x_1N, scale[:, None], SMALLEST, LARGEST, CODE, True, INTERPRETED)
    return tl.reshape(codes, x.shape)


@triton.jit
def _rotated(row_ptr, table_ptr, r, R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rotate R numbers by a row of cos_sin. Pairs: r, r + 1 if INTERLEAVED, else r, r + R / 2."""
    HALF: tl.constexpr = R // 2
    inside = r < R
    if INTERLEAVED:
        first = r % 2 == 0
        partner = r ^ 1
        frequency = r // 2
    else:
        first = r < HALF
        partner = tl.where(first, r + HALF, r - HALF)
        frequency = tl.where(first, r, r - HALF)
    cos = tl.load(table_ptr + frequency, mask=inside, other=0.0)
    sin = tl.load(table_ptr + HALF + frequency, mask=inside, other=0.0)
    x = tl.load(row_ptr + r, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(row_ptr + partner, mask=inside, other=0.0).to(tl.float32)
    rotated = x * cos + other * tl.where(first, -sin, sin)
    return rotated.to(row_ptr.dtype.element_ty)
