"""Every operation of ops.py in plain torch, under the same name and signature: the CPU path.

Legend: M rows of x, K inputs, N outputs, G groups, T tokens of a step, R requests, H query heads, J
KV heads, D head dim, P pages, B tokens of a page, X pages of a block table, L keys, C channels, I
intermediate size. No function except `paged_attention` makes the host wait for a GPU.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from formats import affine
from formats.activation import MIN_INPUT_SCALE, to_codes
from formats.activation import quantize_input as round_input
from formats.bits import unpack
from formats.fp8 import Fp8Weight
from formats.packed import PackedWeight
from formats.scheme import ActivationSpec
from formats.weights import Weight
from qkernels.digits import DigitForm, Digits
from qkernels.partial_sums import LinearOutput, added
from qkernels.prepared import PreparedWeight, linear_by_codes
from qkernels.reference_digits import input_digits, inputs_of

# Keys, and as many values, gathered at once for a batch of decode rows: what stays in a CPU's
# cache. 64 rows of 512 keys, J 4, D 32, one thread: 8.5 ms at 2^20, 23 at 2^22, 15 at 2^16.
GATHER_ELEMENTS = 2**20


# Inputs of one float32 product of int8 codes: 2^10 * 2^7 * 2^7 = 2^24, still exact.
EXACT_INPUTS = 1024


def prepare_weight(
    packed: Weight, dtype: torch.dtype, device: torch.device | str | None = None
) -> PreparedWeight:
    """Keep the codes as they are; `linear` dequantizes on every call.

    Symmetric 8-bit codes of one scale per output become int8 where the input is rounded to int8.
    """
    packed = packed if device is None else packed.to(device)
    if isinstance(packed, Fp8Weight):
        tensors = {"fp8": packed.codes_NK, "scales": packed.scales_RC}
    elif _is_int8(packed):
        signed = packed.codes().to(torch.int16) - packed.spec.symmetric_zero
        tensors = {"int8": signed.to(torch.int8), "scales": packed.scales_NG.float()}
    else:
        tensors = {
            "words": packed.words_NW,
            "scales": packed.scales_NG,
            "zeros": packed.zeros_NG,
        }
    if packed.input_scale is not None:
        tensors["input_scale"] = packed.input_scale
    return PreparedWeight(
        kernel="reference",
        tensors=tensors,
        spec=packed.spec,
        out_features=packed.out_features,
        in_features=packed.in_features,
        dtype=dtype,
        activation=packed.activation,
    )


def quantize_input(
    x_MK: torch.Tensor, activation: ActivationSpec, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] to (codes [M, K], scales [M, S]); groups may make the codes wider."""
    return round_input(x_MK, activation, scale)


def quantize_input_asymmetric(
    x_MK: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [M, K] to int8 codes, float32 scales and int32 zeros [M, 1]: scale * (code - zero).

    The 256 codes span each row's values and 0; rounding is half to even.
    """
    x = x_MK.float()
    low_M1 = x.amin(1, keepdim=True).clamp(max=0)
    high_M1 = x.amax(1, keepdim=True).clamp(min=0)
    scales_M1 = ((high_M1 - low_M1) / 255).clamp(min=MIN_INPUT_SCALE)
    zeros_M1 = (-128 - low_M1 / scales_M1).round().clamp(-128, 127)
    codes = ((x / scales_M1).round() + zeros_M1).clamp(-128, 127)
    return codes.to(torch.int8), scales_M1, zeros_M1.to(torch.int32)


def linear(
    x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [..., K] to [..., N]. With 8-bit activations, x is rounded to codes first."""
    if weight.activation is None:
        return F.linear(x, _dequantize(weight).to(weight.dtype), bias)
    return linear_by_codes(x, weight, bias, quantize_input, linear_codes)


def linear_codes(
    codes_MK: torch.Tensor,
    scales_MS: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None = None,
    zeros_M1: torch.Tensor | None = None,
) -> torch.Tensor:
    """Codes [M, K], S scales of each row, to [M, N]; rounded once."""
    tensors = weight.tensors
    if "int8" in tensors:
        sums_MN = int8_matmul(codes_MK, tensors["int8"])
        return scale_sums(sums_MN, scales_MS, weight, bias, zeros_M1)
    x_MK = codes_MK.float().unflatten(1, (scales_MS.shape[1], -1)) * scales_MS[..., None]
    x_MK = x_MK.flatten(1)[:, : weight.in_features]
    y_MN = x_MK @ _dequantize(weight).t()
    if bias is not None:
        y_MN = y_MN + bias.float()
    return y_MN.to(weight.dtype)


def linear_digits(
    digits: Digits, weight: PreparedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """linear of the inputs that the digits stand for."""
    return linear(inputs_of(digits).to(weight.dtype), weight, bias)


def scale_sums(
    sums_MN: torch.Tensor,
    scales_M1: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None = None,
    zeros_M1: torch.Tensor | None = None,
) -> torch.Tensor:
    """Exact int32 sums [M, N] less those of x's zero points, times both scales, plus bias."""
    if zeros_M1 is not None:
        sums_MN = sums_MN - zeros_M1 * weight.tensors["int8"].sum(1, dtype=torch.int32)
    y_MN = sums_MN.float() * scales_M1 * weight.tensors["scales"].t()
    if bias is not None:
        y_MN = y_MN + bias.float()
    return y_MN.to(weight.dtype)


def int8_matmul(a_MK: torch.Tensor, b_NK: torch.Tensor) -> torch.Tensor:
    """Integer products of int8 codes, summed exactly: int32 [M, N]."""
    total_MN = torch.zeros(a_MK.shape[0], b_NK.shape[0], dtype=torch.int32, device=a_MK.device)
    for a, b in zip(a_MK.split(EXACT_INPUTS, 1), b_NK.split(EXACT_INPUTS, 1), strict=True):
        total_MN += (a.float() @ b.float().t()).to(torch.int32)
    return total_MN


def _is_int8(packed: PackedWeight) -> bool:
    spec, activation = packed.spec, packed.activation
    return (
        activation is not None
        and activation.type == "int"
        and activation.per != "group"
        and (spec.bits, spec.symmetric) == (8, True)
        and packed.scales_NG.shape[1] == 1
    )


def _dequantize(weight: PreparedWeight) -> torch.Tensor:
    """float32 [N, K]."""
    tensors = weight.tensors
    if "fp8" in tensors:
        return Fp8Weight(
            codes_NK=tensors["fp8"], scales_RC=tensors["scales"], spec=weight.spec
        ).dequantize()
    codes_NK = unpack(tensors["words"], weight.spec.bits)
    return affine.dequantize(codes_NK, tensors["scales"], tensors["zeros"])


def rms_norm(x: torch.Tensor, weight_C: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dim, rounding where transformers' LlamaRMSNorm does."""
    x_float = x.float()
    normed = x_float * torch.rsqrt(x_float.square().mean(-1, keepdim=True) + eps)
    return weight_C * normed.to(x.dtype)


def add_rms_norm(
    x: LinearOutput, residual: torch.Tensor, weight_C: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (rms_norm(x + residual), x + residual); the sum is rounded before it is normed."""
    total = added(x) + residual
    return rms_norm(total, weight_C, eps), total


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where x [..., 2 I] is gate beside up."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def rms_norm_quantize(
    x_MC: torch.Tensor,
    weight_C: torch.Tensor,
    eps: float,
    activation: ActivationSpec,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """quantize_input of rms_norm."""
    return quantize_input(rms_norm(x_MC, weight_C, eps), activation, scale)


def add_rms_norm_quantize(
    x_MC: LinearOutput,
    residual_MC: torch.Tensor,
    weight_C: torch.Tensor,
    eps: float,
    activation: ActivationSpec,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """quantize_input of add_rms_norm, and the sum."""
    normed_MC, total_MC = add_rms_norm(x_MC, residual_MC, weight_C, eps)
    return *quantize_input(normed_MC, activation, scale), total_MC


def silu_and_mul_quantize(
    x_M2I: torch.Tensor, activation: ActivationSpec, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """quantize_input of silu_and_mul."""
    return quantize_input(silu_and_mul(x_M2I), activation, scale)


def rms_norm_digits(
    x_MC: torch.Tensor, weight_C: torch.Tensor, eps: float, form: DigitForm
) -> Digits:
    """input_digits of rms_norm."""
    return input_digits(rms_norm(x_MC, weight_C, eps), form)


def add_rms_norm_digits(
    x_MC: torch.Tensor,
    residual_MC: torch.Tensor,
    weight_C: torch.Tensor,
    eps: float,
    form: DigitForm,
) -> tuple[Digits, torch.Tensor]:
    """input_digits of add_rms_norm, and the sum."""
    normed_MC, total_MC = add_rms_norm(x_MC, residual_MC, weight_C, eps)
    return input_digits(normed_MC, form), total_MC


def silu_and_mul_digits(x_M2I: torch.Tensor, form: DigitForm) -> Digits:
    """input_digits of silu_and_mul."""
    return input_digits(silu_and_mul(x_M2I), form)


def apply_rope(
    q_THD: torch.Tensor,
    k_TJD: torch.Tensor,
    cos_sin: torch.Tensor,
    positions_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the first cos_sin.shape[1] channels of each head, halves paired (NeoX), in float32."""
    cos_T1F, sin_T1F = cos_sin[positions_T.long()][:, None].chunk(2, dim=-1)
    return _rotate(q_THD, cos_T1F, sin_T1F), _rotate(k_TJD, cos_T1F, sin_T1F)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([rotated.to(x.dtype), x[..., 2 * half :]], dim=-1)


def write_kv_(
    k_TJD: torch.Tensor,
    v_TJD: torch.Tensor,
    k_pages_PBJD: torch.Tensor,
    v_pages_PBJD: torch.Tensor,
    slots_T: torch.Tensor,
    k_scales_PBJ: torch.Tensor | None = None,
    v_scales_PBJ: torch.Tensor | None = None,
    *,
    static_scales: bool = False,
) -> None:
    """Write each token's key and value into its slot, page * B + offset; slot -1 is padding."""
    if not slots_T.numel():
        return
    # A mask would make the host wait for its length. Instead each padding token repeats the first
    # real one, value and slot; without a real one, the old contents of slot 0 are written back.
    valid_T = slots_T >= 0
    tokens_T = torch.arange(slots_T.shape[0], device=slots_T.device)
    source_T = torch.where(valid_T, tokens_T, valid_T.int().argmax())
    slot_T = slots_T[source_T].long().clamp(min=0)
    index = (slot_T // k_pages_PBJD.shape[1], slot_T % k_pages_PBJD.shape[1])
    for rows, pages, scales_PBJ in (
        (k_TJD, k_pages_PBJD, k_scales_PBJ),
        (v_TJD, v_pages_PBJD, v_scales_PBJ),
    ):
        rows = rows[source_T]
        if scales_PBJ is not None:
            old_TJ = scales_PBJ[index]
            rows, scales_TJ = _quantize_kv(rows, pages.dtype, old_TJ if static_scales else None)
            if not static_scales:
                scales_PBJ.index_put_(index, torch.where(valid_T.any(), scales_TJ, old_TJ))
        # as bytes, which every device can choose from
        stored = pages if pages.element_size() > 1 else pages.view(torch.uint8)
        rows = rows.to(pages.dtype).view(stored.dtype)
        stored.index_put_(index, torch.where(valid_T.any(), rows, stored[index]))


def _quantize_kv(
    x_TJD: torch.Tensor, dtype: torch.dtype, scales_TJ: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [T, J, D] of `dtype` and the scale [T, J] of each row, its own where none is given."""
    kind = "int" if dtype == torch.int8 else "float"
    if scales_TJ is not None:
        return to_codes(x_TJD.float(), scales_TJ[..., None], kind), scales_TJ
    codes, scales = round_input(x_TJD.flatten(0, 1), ActivationSpec(type=kind), None)
    return codes.view(x_TJD.shape), scales.view(x_TJD.shape[:2])


def rope_write_kv_(
    q_THD: LinearOutput,
    k_TJD: LinearOutput,
    v_TJD: LinearOutput,
    cos_sin: torch.Tensor,
    positions_T: torch.Tensor,
    k_pages_PBJD: torch.Tensor,
    v_pages_PBJD: torch.Tensor,
    slots_T: torch.Tensor,
    k_scales_PBJ: torch.Tensor | None = None,
    v_scales_PBJ: torch.Tensor | None = None,
    *,
    static_scales: bool = False,
    q_norm_D: torch.Tensor | None = None,
    k_norm_D: torch.Tensor | None = None,
    eps: float = 0.0,
    settled: bool = False,  # nothing is read ahead
) -> torch.Tensor:
    """Norm q and k where norms are given, rotate them, write k and v; returns q."""
    q_THD, k_TJD, v_TJD = added(q_THD), added(k_TJD), added(v_TJD)
    if q_norm_D is not None:
        q_THD, k_TJD = rms_norm(q_THD, q_norm_D, eps), rms_norm(k_TJD, k_norm_D, eps)
    q_THD, k_TJD = apply_rope(q_THD, k_TJD, cos_sin, positions_T)
    scales = (k_scales_PBJ, v_scales_PBJ)
    write_kv_(
        k_TJD, v_TJD, k_pages_PBJD, v_pages_PBJD, slots_T, *scales, static_scales=static_scales
    )
    return q_THD


def paged_attention(
    q_THD: torch.Tensor,
    k_pages_PBJD: torch.Tensor,
    v_pages_PBJD: torch.Tensor,
    block_tables_RX: torch.Tensor,
    query_starts_R1: torch.Tensor,
    context_lengths_R: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    max_query_len: int,
    max_context_len: int,
    soft_cap: float | None = None,
    k_scales_PBJ: torch.Tensor | None = None,
    v_scales_PBJ: torch.Tensor | None = None,
    digits: DigitForm | None = None,
    settled: bool = False,  # nothing is read ahead
) -> torch.Tensor | Digits:
    """Causal attention of each request's query rows over its paged keys, in float32. [T, H, D].

    Row i of a request with `count` rows stands at position context_length - count + i and sees
    itself and the `window` - 1 keys before it (None: all). Rows that see nothing, or that belong to
    no request, are zero.
    """
    keys, values = _Pages(k_pages_PBJD, k_scales_PBJ), _Pages(v_pages_PBJD, v_scales_PBJ)
    starts = query_starts_R1.tolist()
    counts = [end - start for start, end in zip(starts, starts[1:], strict=False)]
    lengths = context_lengths_R.tolist()
    out_THD = torch.zeros_like(q_THD)
    decodes = [r for r, count in enumerate(counts) if count == 1 and lengths[r] > 0]
    # one gather for rows of similar length wastes least on padding
    decodes.sort(key=lambda r: lengths[r])
    page_elements = k_pages_PBJD.shape[2] * k_pages_PBJD.shape[3]
    while decodes:
        longest = lengths[decodes[-1]] if window is None else min(window, lengths[decodes[-1]])
        size = max(1, GATHER_ELEMENTS // (longest * page_elements))
        batch, decodes = decodes[-size:], decodes[:-size]
        rows = torch.tensor([starts[r] for r in batch], device=q_THD.device)
        out_THD[rows] = _decode(
            q_THD[rows],
            keys,
            values,
            block_tables_RX[batch],
            context_lengths_R[batch],
            longest,
            scale,
            window,
            soft_cap,
        ).to(out_THD.dtype)
    for r, count in enumerate(counts):
        if count > 1 and lengths[r] > 0:
            rows = slice(starts[r], starts[r] + count)
            out_THD[rows] = _chunk(
                q_THD[rows],
                keys,
                values,
                block_tables_RX[r],
                lengths[r],
                scale,
                window,
                soft_cap,
            ).to(out_THD.dtype)
    return out_THD if digits is None else input_digits(out_THD.flatten(1), digits)


class _Pages(NamedTuple):
    """Keys or values, and the scales of their codes where they are 8-bit."""

    pages_PBJD: torch.Tensor
    scales_PBJ: torch.Tensor | None

    def gather(self, index: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """float32 [..., J, D] of (pages, offsets)."""
        found = self.pages_PBJD[index].float()
        return found if self.scales_PBJ is None else found * self.scales_PBJ[index][..., None]


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    soft_cap: float | None,
) -> torch.Tensor:
    """softmax(cap * tanh(scale * q k / cap)) v, masked."""
    if soft_cap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
    scores = soft_cap * torch.tanh(q @ k.transpose(-1, -2) * (scale / soft_cap))
    return scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v


def _decode(
    q_RHD: torch.Tensor,
    keys: _Pages,
    values: _Pages,
    block_tables_RX: torch.Tensor,
    lengths_R: torch.Tensor,
    longest: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """One row for each request: the queries that share a KV head stand as rows of one product."""
    lengths_R1 = lengths_R.long()[:, None]
    first_R1 = (
        torch.zeros_like(lengths_R1) if window is None else (lengths_R1 - window).clamp(min=0)
    )
    positions_RL = first_R1 + torch.arange(longest, device=q_RHD.device)
    visible_RL = positions_RL < lengths_R1
    positions_RL = positions_RL.minimum(lengths_R1 - 1)
    page_size, num_kv_heads = keys.pages_PBJD.shape[1:3]
    index = (block_tables_RX.gather(1, positions_RL // page_size).long(), positions_RL % page_size)
    q_RJQD = q_RHD.float().unflatten(1, (num_kv_heads, -1))
    k_RJLD, v_RJLD = (pages.gather(index).transpose(1, 2) for pages in (keys, values))
    out_RJQD = _attend(q_RJQD, k_RJLD, v_RJLD, visible_RL[:, None, None], scale, soft_cap)
    return out_RJQD.flatten(1, 2)


def _chunk(
    q_SHD: torch.Tensor,
    keys: _Pages,
    values: _Pages,
    block_table_X: torch.Tensor,
    length: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """The S last rows of one request, over the keys that any of them sees."""
    count, (page_size, num_kv_heads) = q_SHD.shape[0], keys.pages_PBJD.shape[1:3]
    first = 0 if window is None else max(0, length - count - window + 1)
    keys_L = torch.arange(first, length, device=q_SHD.device)
    index = (block_table_X[keys_L // page_size].long(), keys_L % page_size)
    queries_S1 = torch.arange(length - count, length, device=q_SHD.device)[:, None]
    visible_SL = keys_L <= queries_S1
    if window is not None:
        visible_SL &= keys_L > queries_S1 - window
    k_JLD, v_JLD = (pages.gather(index).transpose(0, 1) for pages in (keys, values))
    q_JQSD = q_SHD.float().unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
    k_JQLD, v_JQLD = (x[:, None].expand(-1, q_JQSD.shape[1], -1, -1) for x in (k_JLD, v_JLD))
    out_JQSD = _attend(q_JQSD, k_JQLD, v_JQLD, visible_SL, scale, soft_cap)
    return torch.where(queries_S1[:, :, None] >= 0, out_JQSD.flatten(0, 1).transpose(0, 1), 0)
