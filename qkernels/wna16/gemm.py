"""y = x W^T with 4- or 8-bit weights and 16-bit activations: which kernel runs.

Legend: M rows of x, K inputs, N outputs, G groups.
"""

import torch

from qkernels.errors import KernelError
from qkernels.gpu import device as gpu_device
from qkernels.gpu.device import sm_count
from qkernels.linear.prepared import PreparedWeight
from qkernels.operands.limbs import LINEAR_DIGITS_MAX_ROWS, DigitForm, Digits
from qkernels.operands.split_k import LinearOutput, PartialSums, PartReader
from qkernels.rowwise.limbs import input_digits
from qkernels.tuning.table import tile_table_of
from qkernels.wna16 import triton_gemm
from qkernels.wna16.configs import AnyLinearTile, chosen_linear_tile, tabled_linear_tile
from qkernels.wna16.prepack import offset_of
from qkernels.wna16.sm90_gemv_imma_config import LinearDigitsTile
from qkernels.wna16.sm90_large_m_config import LinearHopperTile
from qkernels.wna16.sm90_small_m_config import LinearRingTile, linear_parts_tile
from qkernels.wna16.triton_gemm import aligned, dequantize


def linear(
    x: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None = None,
    *,
    tile: AnyLinearTile | None = None,
) -> torch.Tensor:
    """x [..., K] to [..., N]; equal inputs, equal bits. `tile` replaces the choice of the config."""
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
        from qkernels.wna16 import sm90_large_m as w4a16_hopper

        y_MN = w4a16_hopper.linear(aligned(x_MK), weight, bias, tile, offset=offset_of(weight))
    elif isinstance(tile, LinearRingTile):
        from qkernels.wna16 import sm90_small_m as w4a16_ring

        y_MN = w4a16_ring.linear(aligned(x_MK), weight, bias, tile, offset=offset_of(weight))
    elif isinstance(tile, LinearDigitsTile):
        digits = input_digits(x_MK, _digit_form(tile, weight))
        y_MN = _linear_digits(digits, weight, bias, tile)
    else:
        y_MN = triton_gemm.linear(x_MK, weight, bias, tile)
    return y_MN if x.ndim == 2 else y_MN.view(*x.shape[:-1], N)


def linear_for(
    reader: PartReader, x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None = None
) -> LinearOutput:
    """`linear` of x [M, K], or its parts of K, where `reader` adds them faster.

    Where a table's tile is the ring's, sm90_small_m_config.py says in how many parts all the same.
    """
    tile = None
    if x.ndim == 2 and not (torch.is_grad_enabled() and x.requires_grad):
        tile = _parts_tile(reader, x.device, x.shape[0], weight)
    if tile is None:
        return linear(x, weight, bias)
    from qkernels.wna16 import sm90_small_m as w4a16_ring

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
    from qkernels.wna16 import sm90_gemv_imma as w4a16_digits

    return w4a16_digits.linear(digits, weight, bias, tile, offset=offset_of(weight))


def _tile_for_digits(weight: PreparedWeight, M: int) -> AnyLinearTile | None:
    N, K, spec = weight.out_features, weight.in_features, weight.spec
    group = spec.group_length(K)
    return _chosen_tile(weight.device, M, N, K, group, spec.bits, made=True)


def _chosen_tile(
    device: torch.device, M: int, N: int, K: int, group: int, bits: int, made: bool = False
) -> AnyLinearTile | None:
    """A tile measured on this GPU, else the choice of the config; None: the library multiplies.

    `made`: digits, where the tile is for them, are there already.
    """
    gluon, sms = gpu_device.lacks_gluon(device) is None, sm_count(device)
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
