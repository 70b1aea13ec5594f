"""Write keys and values to their pages in Triton, optionally after norms and rotary embedding.

Pages hold 16-bit numbers, 8-bit codes or 4-bit codes. One kernel implements both operations; each
rounds at the same points as in reference.py. Legend: T tokens, H query heads, J KV heads, D head
dim, P pages, B tokens of a page.
"""

import torch
import triton
import triton.language as tl

from formats.numerics.activation import MIN_INPUT_SCALE
from qkernels.attention.cache import PagedKv
from qkernels.attention.int4.codes_triton import rotate_rows, store_rows
from qkernels.gpu.config import ceil_div, power_of_two
from qkernels.gpu.device import INTERPRETED
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl import pdl_launch_and_wait, pdl_options
from qkernels.operands.codes_triton import CODE_RANGE, encode, magnitude_bits, scale_of
from qkernels.operands.split_k import LinearOutput
from qkernels.operands.split_k_triton import load_reduced, partials_source

ELEMENTS_PER_PROGRAM = 1024  # 8 per thread


def write_kv_(
    k_TJD: torch.Tensor,
    v_TJD: torch.Tensor,
    cache: PagedKv,
    slots_T: torch.Tensor,
) -> None:
    """Implement ops.write_kv_."""
    rope_write_kv_(None, k_TJD, v_TJD, None, None, cache, slots_T)


def rope_write_kv_(
    q_THD: LinearOutput | None,
    k_TJD: LinearOutput,
    v_TJD: LinearOutput,
    cos_sin: torch.Tensor | None,
    positions_T: torch.Tensor | None,
    cache: PagedKv,
    slots_T: torch.Tensor,
    *,
    q_norm_D: torch.Tensor | None = None,
    k_norm_D: torch.Tensor | None = None,
    eps: float = 0.0,
    interleaved: bool = False,
    query_scales: torch.Tensor | None = None,
    inputs_ready: bool = False,
) -> torch.Tensor | None:
    """Implement ops.rope_write_kv_. If `q_THD` is None, k and v are written without RoPE."""
    T, J, D = k_TJD.shape
    H = 0 if q_THD is None else q_THD.shape[1]
    q_out = None
    if q_THD is not None:
        q_out = torch.empty((T, H, D), dtype=q_THD.dtype, device=q_THD.device)
        q_THD, cos_sin = _dense_heads(partials_source(q_THD)[0]), cos_sin.contiguous()
    k_TJD, stride_part, format = partials_source(k_TJD)
    k_TJD, v_TJD = _dense_heads(k_TJD), _dense_heads(partials_source(v_TJD)[0])
    if T == 0:
        return q_out
    smallest, largest = CODE_RANGE.get(cache.k_pages.dtype, (0.0, 0.0))
    padded_d = power_of_two(D)
    if format.parts:
        # With split-K partial sums, small programs wait for fewer loads. A product of 6144 outputs
        # and this kernel take, with 1 or 2 heads: 8 rows 7.2 or 7.6 us, 32 rows 9.4 or 9.6 us,
        # 64 rows 13.9 or 12.6 us.
        heads = 1 if T <= 32 else 2
    else:
        heads = max(1, min(ELEMENTS_PER_PROGRAM // padded_d, power_of_two(max(H, J))))
    with on_device(k_TJD):
        launch(
            _rope_write_kv,
            (T, ceil_div(H, heads) + 2 * ceil_div(J, heads)),
            q_THD,
            k_TJD,
            v_TJD,
            stride_part,
            cos_sin,
            None if positions_T is None else positions_T.contiguous(),
            slots_T.contiguous(),
            None if q_norm_D is None else q_norm_D.contiguous(),
            None if k_norm_D is None else k_norm_D.contiguous(),
            None if query_scales is None else query_scales.contiguous(),
            cache.k_pages,
            cache.v_pages,
            cache.k_scales,
            cache.v_scales,
            q_out,
            *((0, 0) if q_THD is None else q_THD.stride()[:2]),
            *k_TJD.stride()[:2],
            *v_TJD.stride()[:2],
            *cache.k_pages.stride()[:3],
            *cache.v_pages.stride()[:3],
            *cache.scale_strides,
            eps,
            H=H,
            J=J,
            D=D,
            PADDED_D=padded_d,
            WIDTH=0 if cos_sin is None else cos_sin.shape[1],
            INTERLEAVED=interleaved,
            B=cache.page_size,
            HEADS=heads,
            STATIC=cache.static_scales,
            INT4=cache.is_4bit,
            INPUTS_READY=inputs_ready,
            SMALLEST=smallest,
            LARGEST=largest,
            MIN_SCALE=MIN_INPUT_SCALE,
            INTERPRETED=INTERPRETED,
            num_warps=max(1, heads * padded_d // 256),
            SUM=format,
            **pdl_options(k_TJD, T),
        )
    return q_out


def _dense_heads(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


@triton.jit
def _rope_write_kv(
    q_ptr,  # [T, H, D], or split-K partial sums of it (split_k_triton.py); None: no RoPE
    k_ptr,  # [T, J, D], likewise
    v_ptr,  # [T, J, D], likewise
    stride_part,  # between the splits of q, k and v
    cos_sin_ptr,  # [max position, WIDTH]
    positions_ptr,  # [T]
    slots_ptr,  # [T]
    q_norm_ptr,  # [D] or None
    k_norm_ptr,
    query_scales_ptr,  # [max position] or None
    k_pages_ptr,  # [P, B, J, D]
    v_pages_ptr,
    k_scales_ptr,  # [P, B, J] with 8-bit KV, else None
    v_scales_ptr,
    q_out_ptr,  # [T, H, D]
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kj,
    stride_vt,
    stride_vj,
    stride_kp,
    stride_kb,
    stride_kpj,
    stride_vp,
    stride_vb,
    stride_vpj,
    stride_ksp,
    stride_ksb,
    stride_ksj,
    stride_vsp,
    stride_vsb,
    stride_vsj,
    eps,
    H: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    B: tl.constexpr,
    HEADS: tl.constexpr,
    STATIC: tl.constexpr,
    INT4: tl.constexpr,  # 4-bit codes; queries get the Hadamard rotation of the keys
    INPUTS_READY: tl.constexpr,  # slots and positions may be read before the previous kernel ends
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    SUM: tl.constexpr,  # PartialsFormat of q, k and v
    PDL: tl.constexpr,
):
    """Process HEADS heads of one token in each program: of queries, of keys or of values."""
    Q_BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    KV_BLOCKS: tl.constexpr = (J + HEADS - 1) // HEADS
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.arange(0, HEADS)
    d = tl.arange(0, PADDED_D)
    if PDL and not INPUTS_READY:
        pdl_launch_and_wait()
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if q_ptr is not None:
        cos, sin = _angles(cos_sin_ptr, positions_ptr, token, d, WIDTH, INTERLEAVED)
    if PDL and INPUTS_READY:
        pdl_launch_and_wait()
    if Q_BLOCKS > 0 and block < Q_BLOCKS:
        head = block * HEADS + n
        real = (head < H)[:, None] & (d < D)[None, :]
        rows = q_ptr + token * stride_qt + head * stride_qh
        q = _rotated(
            rows, real, stride_part, d, cos, sin, q_norm_ptr, eps, D, WIDTH, INTERLEAVED, SUM
        )
        if INT4:
            q = rotate_rows(q, D).to(q.dtype)
        if query_scales_ptr is not None:
            scale = tl.load(query_scales_ptr + tl.load(positions_ptr + token).to(tl.int64))
            q = (q.to(tl.float32) * scale).to(q_out_ptr.dtype.element_ty)
        tl.store(q_out_ptr + (token * H + head[:, None]) * D + d[None, :], q, mask=real)
        return
    if slot < 0:
        return
    page, offset = slot // B, slot % B
    if block < Q_BLOCKS + KV_BLOCKS:
        head = (block - Q_BLOCKS) * HEADS + n
        real = (head < J)[:, None] & (d < D)[None, :]
        rows = k_ptr + token * stride_kt + head * stride_kj
        if q_ptr is not None:
            k = _rotated(
                rows, real, stride_part, d, cos, sin, k_norm_ptr, eps, D, WIDTH, INTERLEAVED, SUM
            )
        else:
            k = load_reduced(rows[:, None] + d[None, :], real, stride_part, SUM)
        out = k_pages_ptr + page * stride_kp + offset * stride_kb + head * stride_kpj
        if k_scales_ptr is not None:
            scales = k_scales_ptr + page * stride_ksp + offset * stride_ksb + head * stride_ksj
            if INT4:
                store_rows(rotate_rows(k, D), out, scales, head < J, 2, D)
                return
            CODE: tl.constexpr = k_pages_ptr.dtype.element_ty
            k = _encoded(
                k, scales, head < J, STATIC, SMALLEST, LARGEST, MIN_SCALE, CODE, INTERPRETED
            )
        tl.store(out[:, None] + d[None, :], k, mask=real)
        return
    head = (block - Q_BLOCKS - KV_BLOCKS) * HEADS + n
    real = (head < J)[:, None] & (d < D)[None, :]
    rows = v_ptr + token * stride_vt + head * stride_vj
    v = load_reduced(rows[:, None] + d[None, :], real, stride_part, SUM)
    out = v_pages_ptr + page * stride_vp + offset * stride_vb + head * stride_vpj
    if v_scales_ptr is not None:
        scales = v_scales_ptr + page * stride_vsp + offset * stride_vsb + head * stride_vsj
        if INT4:
            store_rows(v.to(tl.float32), out, scales, head < J, 1, D)
            return
        CODE: tl.constexpr = v_pages_ptr.dtype.element_ty
        v = _encoded(v, scales, head < J, STATIC, SMALLEST, LARGEST, MIN_SCALE, CODE, INTERPRETED)
    tl.store(out[:, None] + d[None, :], v, mask=real)


@triton.jit
def _angles(cos_sin_ptr, positions_ptr, token, d, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return one token's cosines and signed sines for the channels d; 1 and 0 beyond WIDTH."""
    HALF: tl.constexpr = WIDTH // 2
    turns = d < WIDTH
    if INTERLEAVED:
        first = d % 2 == 0
        frequency = d // 2
    else:
        first = d < HALF
        frequency = tl.where(first, d, d - HALF)
    row = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * WIDTH
    cos = tl.load(row + frequency, mask=turns, other=1.0)
    sin = tl.load(row + frequency + HALF, mask=turns, other=0.0)
    return cos, tl.where(first, -sin, sin)


@triton.jit
def _rotated(
    rows,
    real,
    stride_part,
    d,
    cos,
    sin,
    norm_ptr,
    eps,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SUM: tl.constexpr,
):
    """Load heads [HEADS, D], apply the norm if there is one, rotate by one token's angles."""
    DTYPE: tl.constexpr = SUM.dtype
    HALF: tl.constexpr = WIDTH // 2
    if INTERLEAVED:
        partner = tl.where(d < WIDTH, d ^ 1, d)
    else:
        partner = tl.where(d < HALF, d + HALF, tl.where(d < WIDTH, d - HALF, d))
    x = load_reduced(rows[:, None] + d[None, :], real, stride_part, SUM)
    other = load_reduced(rows[:, None] + partner[None, :], real, stride_part, SUM)
    x, other = x.to(tl.float32), other.to(tl.float32)
    if norm_ptr is not None:
        shrink = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = _scaled(x, shrink, tl.load(norm_ptr + d, mask=d < D, other=0.0), DTYPE)
        weight = tl.load(norm_ptr + partner, mask=d < D, other=0.0)
        other = _scaled(other, shrink, weight, DTYPE)
    return (x * cos[None, :] + other * sin[None, :]).to(DTYPE)


@triton.jit
def _scaled(x, shrink, weight, DTYPE: tl.constexpr):
    """Apply the factor and the weight of an RMS norm, rounding where rowwise/norm.py rounds."""
    normed = x * shrink
    if weight.dtype != tl.float32:  # with a float32 weight, only the product is rounded
        normed = normed.to(DTYPE).to(tl.float32)
    return (weight.to(tl.float32)[None, :] * normed).to(DTYPE).to(tl.float32)


@triton.jit
def _encoded(
    x,  # [HEADS, D]
    scales,  # [HEADS] pointers
    exists,  # [HEADS]
    STATIC: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Convert rows to codes, with the stored scales if STATIC, else with scales that it stores."""
    x = x.to(tl.float32)
    if STATIC:
        scale = tl.load(scales, mask=exists, other=1.0)
    else:
        scale = scale_of(magnitude_bits(x), LARGEST, MIN_SCALE)
        tl.store(scales, scale, mask=exists)
    return encode(x, scale[:, None], SMALLEST, LARGEST, DTYPE, not STATIC, INTERPRETED)
