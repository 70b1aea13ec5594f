"""W4A16 and W8A16 on a CPU in bfloat16, with torch's own products of packed weights.

The codes stay packed, so one row reads a quarter (4 bits) or half (8 bits) of the bytes that
`dense` reads. From about 8 rows on `dense` is faster, but takes four times the memory. Scales, and
minima of GGUF blocks, are rounded to bfloat16; the weight itself is not. In float32 and float16
these torch products run a scalar loop, which takes twenty times as long as `dense`; so dispatch
offers only bfloat16. Legend: M rows of x, N outputs, K inputs, G groups.
"""

from dataclasses import replace

import torch

from formats.in_memory.k_weight import KWeight
from formats.in_memory.packed import PackedWeight
from qkernels.linear.plan import GemmPlan
from qkernels.linear.prepared import PreparedWeight
from qkernels.wna16.layout import kernel_bits


def prepare_weight(
    packed: PackedWeight | KWeight, dtype: torch.dtype, device: torch.device | str | None = None
) -> PreparedWeight:
    """Pack the codes as torch does, and round the scales to bfloat16."""
    packed = packed if device is None else packed.to(device)
    spec = packed.spec
    if isinstance(packed, KWeight):
        codes_NK, grid = packed.codes_and_grid()
        start, stop = packed.input_range
        groups = slice(start // grid.length, stop // grid.length)
        steps_NG, lows_NG = grid.steps()[:, groups], grid.lows()[:, groups]
        # computed with the unrounded scale, so that its rounding error multiplies only (code - 8)
        offsets_NG = (8.0 * steps_NG - lows_NG).to(dtype)
        tensors = _nibbles(codes_NK[:, start:stop], steps_NG.to(dtype), offsets_NG)
        prepared = PreparedWeight.of(packed, kernel="cpu_w4a16", tensors=tensors, dtype=dtype)
        return replace(prepared, spec=spec.integer_form)
    packed = packed.with_bits(kernel_bits(spec.bits))
    codes_NK, spec = packed.codes(), packed.spec
    if spec.bits == 4:
        scales_NG = packed.scales_NG.to(dtype)
        offsets_NG = ((8.0 - packed.zeros_NG.float()) * scales_NG.float()).to(dtype)
        tensors = _nibbles(codes_NK, scales_NG, offsets_NG)
    else:
        signed_NK = (codes_NK.to(torch.int16) - spec.symmetric_zero).to(torch.int8)
        tensors = {"codes": signed_NK, "scales": packed.scales_NG[:, 0].to(dtype)}
    return PreparedWeight.of(packed, kernel=f"cpu_w{spec.bits}a16", tensors=tensors, dtype=dtype)


def _nibbles(
    codes_NK: torch.Tensor, scales_NG: torch.Tensor, offsets_NG: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return torch's tensors for weights (code - 8) scale + offset."""
    return {
        "codes": torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes_NK.int().contiguous(), 1),
        "scales": torch.stack([scales_NG.t(), offsets_NG.t()], dim=-1).contiguous(),
    }


def run(
    plan: GemmPlan, x_MK: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply x [M, K] to [M, N]."""
    y_MN = _product(x_MK, weight)
    return y_MN if bias is None else y_MN + bias


def dequantize(weight: PreparedWeight) -> torch.Tensor:
    """Return the weight [N, K].

    It is multiplied by the identity, because only torch knows its packed order.
    """
    identity_KK = torch.eye(weight.in_features, dtype=weight.dtype)
    return _product(identity_KK, weight).t()


def _product(x_MK: torch.Tensor, weight: PreparedWeight) -> torch.Tensor:
    codes, scales = weight.tensors["codes"], weight.tensors["scales"]
    if x_MK.shape[0] == 0:
        return x_MK.new_empty(0, weight.out_features)
    if weight.spec.bits == 8:
        return torch._weight_int8pack_mm(x_MK, codes, scales)
    group = weight.spec.group_length(weight.in_features)
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x_MK, codes, group, scales)
