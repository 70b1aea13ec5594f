"""y = x W^T with 4- or 8-bit weights and 16-bit activations: which kernel runs.

Legend: M rows of x, K inputs, N outputs, G groups.
"""

import torch

from qkernels.errors import KernelError
from qkernels.gpu import device as gpu_device
from qkernels.gpu.device import sm_count
from qkernels.linear.prepared import PreparedWeight
from qkernels.operands.limbs import LIMBS_MAX_ROWS, LimbForm, Limbs
from qkernels.operands.split_k import Consumer, LinearOutput, SplitKPartials
from qkernels.rowwise.limbs import to_limbs
from qkernels.tuning.table import tuning_table_of
from qkernels.wna16 import triton_gemm
from qkernels.wna16.configs import WNA16Config, default_config, usable_tuned_config
from qkernels.wna16.prepack import offset_of
from qkernels.wna16.sm90_gemv_imma_config import GemvImmaConfig
from qkernels.wna16.sm90_large_m_config import LargeMConfig
from qkernels.wna16.sm90_small_m_config import SmallMConfig, split_k_config
from qkernels.wna16.triton_gemm import aligned, dequantize
from qkernels.wna16.tuned import TUNED


def linear(
    x: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None = None,
    *,
    tile: WNA16Config | None = None,
) -> torch.Tensor:
    """x [..., K] to [..., N]; equal inputs, equal bits. `tile` replaces the chosen config."""
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
    if isinstance(tile, LargeMConfig):
        from qkernels.wna16 import sm90_large_m as w4a16_hopper

        y_MN = w4a16_hopper.linear(aligned(x_MK), weight, bias, tile, offset=offset_of(weight))
    elif isinstance(tile, SmallMConfig):
        from qkernels.wna16 import sm90_small_m as w4a16_ring

        y_MN = w4a16_ring.linear(aligned(x_MK), weight, bias, tile, offset=offset_of(weight))
    elif isinstance(tile, GemvImmaConfig):
        limbs = to_limbs(x_MK, _limb_form(tile, weight))
        y_MN = _linear_limbs(limbs, weight, bias, tile)
    else:
        y_MN = triton_gemm.linear(x_MK, weight, bias, tile)
    return y_MN if x.ndim == 2 else y_MN.view(*x.shape[:-1], N)


def linear_split_k(
    consumer: Consumer, x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None = None
) -> LinearOutput:
    """`linear` of x [M, K], or its parts of K, where `reader` adds them faster.

    Where a table's tile is the ring's, sm90_small_m_config.py says in how many parts all the same.
    """
    tile = None
    if x.ndim == 2 and not (torch.is_grad_enabled() and x.requires_grad):
        tile = _parts_tile(consumer, x.device, x.shape[0], weight)
    if tile is None:
        return linear(x, weight, bias)
    from qkernels.wna16 import sm90_small_m as w4a16_ring

    x_MK = aligned(x.contiguous())
    parts = w4a16_ring.linear_parts(x_MK, weight, bias, tile, offset=offset_of(weight))
    return SplitKPartials(parts=parts, dtype=x.dtype)


def _parts_tile(
    consumer: Consumer, device: torch.device, M: int, weight: PreparedWeight
) -> SmallMConfig | None:
    N, K, spec = weight.out_features, weight.in_features, weight.spec
    group = spec.group_length(K)
    tile = split_k_config(consumer, M, N, K, group, spec.bits, sm_count(device))
    if tile is None:
        return None
    usual = _chosen_tile(device, M, N, K, group, spec.bits)
    return tile if isinstance(usual, SmallMConfig) else None


def limb_form(weight: PreparedWeight, M: int) -> LimbForm | None:
    """How `linear_limbs` takes M rows; None: as limbs they would not be faster."""
    if not 0 < M <= LIMBS_MAX_ROWS:
        return None
    return _limb_form(_config_for_limbs(weight, M), weight)


def linear_limbs(
    limbs: Limbs, weight: PreparedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`linear` of an input that is limbs already, in the form of `limb_form`: [M, N]."""
    tile = _config_for_limbs(weight, limbs.num_rows)
    wanted = _limb_form(tile, weight)
    if limbs.form != wanted:
        raise KernelError("linear_limbs limbs", f"expected {wanted}, found {limbs.form}")
    return _linear_limbs(limbs, weight, bias, tile)


def _limb_form(tile: WNA16Config | None, weight: PreparedWeight) -> LimbForm | None:
    """What a tile's body takes; None: no limbs."""
    if not isinstance(tile, GemvImmaConfig):
        return None
    return LimbForm(bits=weight.spec.bits, with_sums=not weight.spec.symmetric)


def _linear_limbs(
    limbs: Limbs,
    weight: PreparedWeight,
    bias: torch.Tensor | None,
    tile: GemvImmaConfig,
) -> torch.Tensor:
    from qkernels.wna16 import sm90_gemv_imma as w4a16_digits

    return w4a16_digits.linear(limbs, weight, bias, tile, offset=offset_of(weight))


def _config_for_limbs(weight: PreparedWeight, M: int) -> WNA16Config | None:
    N, K, spec = weight.out_features, weight.in_features, weight.spec
    group = spec.group_length(K)
    return _chosen_tile(weight.device, M, N, K, group, spec.bits, made=True)


def _chosen_tile(
    device: torch.device, M: int, N: int, K: int, group: int, bits: int, made: bool = False
) -> WNA16Config | None:
    """A tile measured on this GPU, else the choice of the config; None: the library multiplies.

    `made`: limbs, where the tile is for them, are there already.
    """
    gluon, sms = gpu_device.lacks_gluon(device) is None, sm_count(device)
    row = tuning_table_of(device).find(TUNED, N=N, K=K, group=group, bits=bits, M=M)
    if row:
        tile, can_run = usable_tuned_config(row.config, M, N, K, sms, gluon)
        if can_run:
            return tile
    return default_config(M, N, K, group, bits, sms, gluon, made)


class _Differentiable(torch.autograd.Function):
    """The gradient for x, so that a frozen quantized layer may stand inside a trained model."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.weight = weight
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        return grad @ dequantize(ctx.weight), None, None
