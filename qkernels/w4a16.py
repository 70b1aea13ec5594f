"""y = x W^T with 4- or 8-bit weights and 16-bit activations: which body. Knows no file format.

All bodies read one private copy of the weight, in the order of the tensor core's register fragment
(README.md has the picture).

Legend: M rows of x, K inputs, N outputs, G groups; BK inputs of a step.
"""

import torch

from formats.packed import PackedWeight
from qkernels import w4a16_portable
from qkernels.digits import DigitForm, Digits
from qkernels.errors import KernelError
from qkernels.input_digits import input_digits
from qkernels.launch import lacks_gluon, sm_count, tile_table_of, workspace
from qkernels.linear_choice import AnyLinearTile, chosen_linear_tile, tabled_linear_tile
from qkernels.partial_sums import LinearOutput, PartialSums, PartReader
from qkernels.prepared import PreparedWeight
from qkernels.tiles import (
    LINEAR_DIGITS_MAX_ROWS,
    LINEAR_TILE_N,
    LinearDigitsTile,
    linear_block_k,
    linear_padded_n,
)
from qkernels.w4a16_hopper_tiles import LinearHopperTile
from qkernels.w4a16_portable import VALUE_OF_ZERO, aligned, dequantize, offset_of
from qkernels.w4a16_ring_tiles import LinearRingTile, linear_parts_tile


def fragment_order(codes_NK: torch.Tensor) -> torch.Tensor:
    """Codes [N, K] to int32 words [N, K / 8], the private order.

    Of 32 inputs in a row, word t = 0..3 holds input k = 16 i + 8 h + 2 t + e at bit 8 i + 4 h + 16
    e, for i, h, e in {0, 1}.
    """
    codes_NKihte = codes_NK.to(torch.int32).unflatten(1, (-1, 2, 2, 4, 2))
    words_NKt = torch.zeros_like(codes_NKihte[:, :, 0, 0, :, 0])
    for i in range(2):
        for h in range(2):
            for e in range(2):
                words_NKt |= codes_NKihte[:, :, i, h, :, e] << (8 * i + 4 * h + 16 * e)
    return words_NKt.flatten(1)


def byte_order(codes_NK: torch.Tensor) -> torch.Tensor:
    """8-bit codes [N, K] to int32 words [N, K / 4], the private order.

    Of 16 inputs in a row, word t = 0..3 holds input k = 8 h + 2 t + e at bit 8 h + 16 e, for h, e
    in {0, 1}.
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
    """Reorder into contiguous tiles of 64 outputs by one step of inputs.

    Outputs are padded with code 0 and scale 0. An asymmetric weight's zeros are stored as the
    number to subtract: what an unpacked 0 is + zero, exact in `dtype`.
    """
    packed = packed if device is None else packed.to(device)
    block_k = linear_block_k(packed.spec.group_length(packed.in_features))
    bits = packed.spec.bits
    order = fragment_order if bits == 4 else byte_order
    words_NW = _pad_rows(order(packed.codes()))
    words = words_NW.unflatten(1, (-1, block_k * bits // 128, 4)).unflatten(0, (-1, LINEAR_TILE_N))
    tensors = {
        "words": words.permute(0, 2, 1, 4, 3).contiguous(),  # [N/64, K/BK, 64, 4, BK * bits / 128]
        "scales": _tiles_of_groups(packed.scales_NG),  # [N/64, G, 64]
    }
    if not packed.spec.symmetric:
        tensors["offsets"] = _tiles_of_groups(
            packed.zeros_NG.to(dtype) + VALUE_OF_ZERO[dtype, bits]
        )
    workspace(packed.device)
    return PreparedWeight(
        kernel=f"triton_w{bits}a16",
        tensors=tensors,
        spec=packed.spec,
        out_features=packed.out_features,
        in_features=packed.in_features,
        dtype=dtype,
    )


def _pad_rows(rows: torch.Tensor) -> torch.Tensor:
    missing = linear_padded_n(rows.shape[0]) - rows.shape[0]
    return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing else rows


def _tiles_of_groups(values_NG: torch.Tensor) -> torch.Tensor:
    return _pad_rows(values_NG).unflatten(0, (-1, LINEAR_TILE_N)).transpose(1, 2).contiguous()


def linear(
    x: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None = None,
    *,
    tile: AnyLinearTile | None = None,
) -> torch.Tensor:
    """x [..., K] to [..., N]; equal inputs, equal bits. `tile` replaces the choice of tiles.py."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _Differentiable.apply(x, weight, bias)
    N, K = weight.out_features, weight.in_features
    # reshape and view take the host's time where they have nothing to do, a tenth of this call
    x_MK = (x if x.ndim == 2 else x.reshape(-1, K)).contiguous()
    M = x_MK.shape[0]
    if M == 0:
        return x.new_empty(*x.shape[:-1], N)
    group, bits = weight.spec.group_length(K), weight.spec.bits
    if tile is None:
        tile = _chosen_tile(x.device, M, N, K, group, bits)
    if tile is None:
        return torch.nn.functional.linear(x, dequantize(weight), bias)
    if isinstance(tile, LinearHopperTile):
        from qkernels import w4a16_hopper

        y_MN = w4a16_hopper.linear(aligned(x_MK), weight, bias, tile, offset=offset_of(weight))
    elif isinstance(tile, LinearRingTile):
        from qkernels import w4a16_ring

        y_MN = w4a16_ring.linear(aligned(x_MK), weight, bias, tile, offset=offset_of(weight))
    elif isinstance(tile, LinearDigitsTile):
        digits = input_digits(x_MK, _digit_form(tile, weight))
        y_MN = _linear_digits(digits, weight, bias, tile)
    else:
        y_MN = w4a16_portable.linear(x_MK, weight, bias, tile)
    return y_MN if x.ndim == 2 else y_MN.view(*x.shape[:-1], N)


def linear_for(
    reader: PartReader, x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None = None
) -> LinearOutput:
    """`linear` of x [M, K], or its parts of K, where `reader` adds them faster.

    Where a table's tile is the ring's, w4a16_ring_tiles.py says in how many parts all the same.
    """
    tile = None
    if x.ndim == 2 and not (torch.is_grad_enabled() and x.requires_grad):
        tile = _parts_tile(reader, x.device, x.shape[0], weight)
    if tile is None:
        return linear(x, weight, bias)
    from qkernels import w4a16_ring

    x_MK = aligned(x.contiguous())
    parts = w4a16_ring.linear_parts(x_MK, weight, bias, tile, offset=offset_of(weight))
    return PartialSums(parts=parts, dtype=x.dtype)


def _parts_tile(
    reader: PartReader, device: torch.device, M: int, weight: PreparedWeight
) -> LinearRingTile | None:
    N, K, spec = weight.out_features, weight.in_features, weight.spec
    group = spec.group_length(K)
    tile = linear_parts_tile(reader, M, N, K, group, spec.bits, sm_count(device))
    if tile is None:
        return None
    usual = _chosen_tile(device, M, N, K, group, spec.bits)
    return tile if isinstance(usual, LinearRingTile) else None


def digit_form(weight: PreparedWeight, M: int) -> DigitForm | None:
    """How `linear_digits` takes M rows; None: as digits they would not be faster."""
    if not 0 < M <= LINEAR_DIGITS_MAX_ROWS:
        return None
    return _digit_form(_tile_for_digits(weight, M), weight)


def linear_digits(
    digits: Digits, weight: PreparedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`linear` of an input that is digits already, in the form of `digit_form`: [M, N]."""
    tile = _tile_for_digits(weight, digits.num_rows)
    wanted = _digit_form(tile, weight)
    if digits.form != wanted:
        raise KernelError("linear_digits digits", f"expected {wanted}, found {digits.form}")
    return _linear_digits(digits, weight, bias, tile)


def _digit_form(tile: AnyLinearTile | None, weight: PreparedWeight) -> DigitForm | None:
    """What a tile's body takes; None: no digits."""
    if not isinstance(tile, LinearDigitsTile):
        return None
    return DigitForm(bits=weight.spec.bits, with_sums=not weight.spec.symmetric)


def _linear_digits(
    digits: Digits,
    weight: PreparedWeight,
    bias: torch.Tensor | None,
    tile: LinearDigitsTile,
) -> torch.Tensor:
    from qkernels import w4a16_digits

    return w4a16_digits.linear(digits, weight, bias, tile, offset=offset_of(weight))


def _tile_for_digits(weight: PreparedWeight, M: int) -> AnyLinearTile | None:
    N, K, spec = weight.out_features, weight.in_features, weight.spec
    group = spec.group_length(K)
    return _chosen_tile(weight.device, M, N, K, group, spec.bits, made=True)


def _chosen_tile(
    device: torch.device, M: int, N: int, K: int, group: int, bits: int, made: bool = False
) -> AnyLinearTile | None:
    """A tile measured on this GPU, else the choice of tiles.py; None: the library multiplies.

    `made`: digits, where the tile is for them, are there already.
    """
    gluon, sms = lacks_gluon(device) is None, sm_count(device)
    row = tile_table_of(device).find("w4a16", N=N, K=K, group=group, bits=bits, M=M)
    if row:
        tile, can_run = tabled_linear_tile(row.tile, M, N, K, sms, gluon)
        if can_run:
            return tile
    return chosen_linear_tile(M, N, K, group, bits, sms, gluon, made)


class _Differentiable(torch.autograd.Function):
    """The gradient for x, so that a frozen quantized layer may stand inside a trained model."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.weight = weight
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        return grad @ dequantize(ctx.weight), None, None
