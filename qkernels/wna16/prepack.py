"""Prepacked weight: codes in the order of the tensor core's register fragment.

All GPU kernels of this folder read this layout (notes/layouts.md). Legend: K inputs, N outputs, G
groups; BK inputs of a K step.
"""

from dataclasses import dataclass

import torch

from formats.in_memory.k_weight import KWeight
from formats.in_memory.packed import PackedWeight
from formats.scheme import QuantSpec
from qkernels.gpu.workspace import workspace
from qkernels.linear.prepared import PreparedWeight
from qkernels.operands.limbs import K_STEP
from qkernels.wna16.layout import (
    TILE_N,
    GroupedSpec,
    grouped_spec,
    k_step,
    kernel_bits,
    padded_n,
)
from qkernels.wna16.unpack.fp4_layout import Fp4Words, fp4_words


def fragment_order(codes_NK: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit codes [N, K] into words, int32 [N, K / 8].

    The layout repeats every 32 inputs, in words t = 0..3. Word t holds input k = 16 i + 8 h + 2 t +
    e at bit 8 i + 4 h + 16 e. Here i, h and e are 0 or 1.
    """
    codes_NKihte = codes_NK.to(torch.int32).unflatten(1, (-1, 2, 2, 4, 2))
    words_NKt = torch.zeros_like(codes_NKihte[:, :, 0, 0, :, 0])
    for i in range(2):
        for h in range(2):
            for e in range(2):
                words_NKt |= codes_NKihte[:, :, i, h, :, e] << (8 * i + 4 * h + 16 * e)
    return words_NKt.flatten(1)


def byte_order(codes_NK: torch.Tensor) -> torch.Tensor:
    """Pack 8-bit codes [N, K] into words, int32 [N, K / 4].

    The layout repeats every 16 inputs, which take words t = 0..3. Word t holds input k = 8 h + 2 t
    + e at bit 8 h + 16 e, for h, e in {0, 1}.
    """
    codes_NKhte = codes_NK.to(torch.int32).unflatten(1, (-1, 2, 4, 2))
    words_NKt = torch.zeros_like(codes_NKhte[:, :, 0, :, 0])
    for h in range(2):
        for e in range(2):
            words_NKt |= codes_NKhte[:, :, h, :, e] << (8 * h + 16 * e)
    return words_NKt.flatten(1)


def prepare_weight(
    packed: PackedWeight, dtype: torch.dtype, device: torch.device | str | None = None
) -> PreparedWeight:
    """Prepack into contiguous tiles of 64 outputs by one K step.

    Codes of 2 and 3 bits are stored in 4 bits, those of 5 to 7 bits in 8. Padding outputs have code
    0 and scale 0. The zero points of an asymmetric weight are stored as `offsets`, which kernels
    subtract from an unpacked code: zero point + VALUE_OF_ZERO, exact in `dtype`.
    """
    packed = packed if device is None else packed.to(device)
    packed = packed.with_bits(kernel_bits(packed.spec.bits))
    block_k = k_step(packed.spec.group_length(packed.in_features))
    bits = packed.spec.bits
    tensors = {
        "packed": _tiles_of_words(packed.codes(), bits, block_k),
        "scales": _tiles_of_groups(packed.scales_NG),  # [N/64, G, 64]
    }
    if not packed.spec.symmetric:
        offsets_NG = packed.zeros_NG.to(dtype) + VALUE_OF_ZERO[dtype, bits]
        tensors["offsets"] = _tiles_of_groups(offsets_NG)
    workspace(packed.device)
    return PreparedWeight.of(packed, kernel=f"w{bits}a16", tensors=tensors, dtype=dtype)


def prepare_blocks(
    weight: KWeight, dtype: torch.dtype, device: torch.device | str | None = None
) -> PreparedWeight:
    """Prepack a weight of GGUF blocks: codes, scales and minima, all exact.

    Scales and minima of a row and a K step are adjacent, and so are d and dmin of a row.
    """
    weight = weight if device is None else weight.to(device)
    spec = grouped_spec(weight.spec, weight.in_features, weight.inputs)
    codes_NK, grid = weight.codes_and_grid()
    start, stop = weight.input_range
    codes_NK = codes_NK[:, start:stop]
    if spec.symmetric:  # symmetric codes have a zero instead of minima
        codes_NK = codes_NK + (spec.symmetric_zero - weight.spec.symmetric_zero)
    groups = slice(start // spec.group, stop // spec.group)
    tensors = {"packed": _tiles_of_words(codes_NK, spec.bits, spec.group_size)}
    # scales [N/64, K/BK, 64, P, groups], int8 or float16; blocks [N/64, B, 64, P, 1], float16
    if spec.block:
        scales = [grid.scales_NG, grid.minima_NG][: spec.parts]
        parts = [part.to(torch.int8)[:, groups] for part in scales]
        repeats = weight.kind.length // spec.block
        blocks = slice(start // spec.block, stop // spec.block)
        floats = [grid.d_NB, grid.dmin_NB][: spec.parts]
        whole = [each.repeat_interleave(repeats, 1)[:, blocks] for each in floats]
        tensors["blocks"] = _by_step([_tiles_of_groups(each) for each in whole], 1)
    else:
        parts = [grid.d_NB[:, groups], grid.dmin_NB[:, groups]]
    tensors["scales"] = _by_step([_tiles_of_groups(part) for part in parts], spec.groups)
    workspace(weight.device)
    return PreparedWeight(
        kernel=f"w{spec.bits}a16",
        tensors=tensors,
        spec=spec,
        out_features=weight.out_features,
        in_features=weight.in_features,
        dtype=dtype,
    )


def _by_step(parts: list[torch.Tensor], groups: int) -> torch.Tensor:
    """Rearrange parts [N/64, columns, 64] to [N/64, steps, 64, P, groups]."""
    by_step = [part.unflatten(1, (-1, groups)).transpose(2, 3) for part in parts]
    return torch.stack(by_step, 3).contiguous()


def _tiles_of_words(codes_NK: torch.Tensor, bits: int, block_k: int) -> torch.Tensor:
    """Pack 4- or 8-bit codes into words, int32 [N/64, K/BK, 64, 4, BK * bits / 128]."""
    order = fragment_order if bits == 4 else byte_order
    words_NW = _pad_rows(order(codes_NK))
    words = words_NW.unflatten(1, (-1, block_k * bits // 128, 4)).unflatten(0, (-1, TILE_N))
    return words.permute(0, 2, 1, 4, 3).contiguous()


def _pad_rows(rows: torch.Tensor) -> torch.Tensor:
    missing = padded_n(rows.shape[0]) - rows.shape[0]
    return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing else rows


def _tiles_of_groups(values_NG: torch.Tensor) -> torch.Tensor:
    """Rearrange values [N, G] to [N/64, G, 64]."""
    return _pad_rows(values_NG).unflatten(0, (-1, TILE_N)).transpose(1, 2).contiguous()


# (activation dtype, bits) -> value to which kernels unpack code 0, before they subtract the offset
VALUE_OF_ZERO = {
    (torch.float16, 4): 1024,
    (torch.float16, 8): 1024,
    (torch.bfloat16, 4): 128,
    (torch.bfloat16, 8): -128,
}


def code_offset(spec: QuantSpec, dtype: torch.dtype) -> int:
    """Return the offset that kernels subtract from codes if the weight has no `offsets`."""
    zero = spec.symmetric_zero if spec.symmetric or not isinstance(spec, GroupedSpec) else 0
    return VALUE_OF_ZERO[dtype, spec.bits] + zero


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNumerics:
    """Numerics of a prepacked weight, a constexpr of kernels with K steps of 128 inputs."""

    bits: int
    steps_per_group: int
    offset: int  # subtracted from an unpacked code of a symmetric weight (prepack.py)
    has_offsets: bool
    has_bias: bool
    groups: int = 1  # groups per K step; with several, each has a scale and minimum (GroupedSpec)
    # stored K steps in 128 inputs; several if the group has 64 or 32 inputs, each with one scale
    stored_steps: int = 1
    steps_per_block: int = 0  # K steps that share d and dmin; 0: no d and dmin
    fp4: Fp4Words | None = None  # 4-bit floats


def weight_numerics(weight: PreparedWeight, bias: torch.Tensor | None) -> WeightNumerics:
    """Return the numerics of a prepacked weight and its bias."""
    return stack_numerics(weight.spec, weight.in_features, weight.dtype, weight.tensors, bias)


def stack_numerics(
    spec: QuantSpec,
    in_features: int,
    dtype: torch.dtype,
    tensors: dict[str, torch.Tensor],
    bias: torch.Tensor | None,
) -> WeightNumerics:
    """Return the numerics of a prepacked weight or a stack of them, for activations of `dtype`."""
    is_grouped = isinstance(spec, GroupedSpec)
    group = spec.group_length(in_features)
    return WeightNumerics(
        groups=spec.groups if is_grouped else 1,
        steps_per_block=spec.steps_per_block if is_grouped else 0,
        bits=spec.bits,
        stored_steps=1 if is_grouped else K_STEP // k_step(group),
        steps_per_group=max(1, group // K_STEP),
        offset=VALUE_OF_ZERO[dtype, spec.bits] + spec.symmetric_zero,
        has_offsets="offsets" in tensors,
        fp4=fp4_words(spec, dtype),
        has_bias=bias is not None,
    )
