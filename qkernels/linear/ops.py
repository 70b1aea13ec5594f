"""The linear operations: each checks its arguments, then runs a kernel. Legend as in ops.py."""

from dataclasses import replace

import torch

from formats.weights import Weight
from qkernels import dispatch
from qkernels.checks import check_float, check_tensor
from qkernels.errors import KernelError
from qkernels.linear.prepared import PreparedWeight
from qkernels.operands.codes import CODE_DTYPES
from qkernels.operands.limbs import LimbForm, Limbs
from qkernels.operands.split_k import Consumer, LinearOutput
from qkernels.problem import FLOAT_DTYPES, Problem


def prepare_weight(
    packed: Weight,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    kernel: str | None = None,
) -> PreparedWeight:
    """Make one kernel's private copy of a weight. Pure: `packed` is untouched.

    `dtype` is the activations'; `device` None means the weight's own. `kernel` names a row of
    qkernels.dispatch instead of the best one. Raises KernelError where that row cannot run.
    """
    device = packed.device if device is None else torch.device(device)
    if dtype not in FLOAT_DTYPES:
        raise KernelError("weight", f"expected a float dtype of activations, found {dtype}")
    problem = Problem(
        device=device.type,
        dtype=dtype,
        requested=kernel,
        spec=packed.spec,
        out_features=packed.out_features,
        in_features=packed.in_features,
        activation=packed.activation,
    )
    row = dispatch.choose("linear", problem)
    order = packed.input_order
    if order is not None:  # kernels see sorted inputs; `linear` sorts x
        packed, order = replace(packed, input_order=None), order.to(device)
    prepared = dispatch.linear_module(row.name).prepare_weight(packed, dtype, device)
    return replace(prepared, input_order=order, activation=packed.activation)


def linear(
    x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [..., K] times the weight's transpose, plus bias [N]: [..., N]."""
    check_linear(x, weight, bias)
    return dispatch.linear_module(weight.kernel).linear(weight.sorted_inputs(x), weight, bias)


def linear_codes(
    codes_MK: torch.Tensor,
    scales_M1: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None = None,
    zeros_M1: torch.Tensor | None = None,
) -> torch.Tensor:
    """`linear` of an input that is codes already, [M, K] with scales [M, 1] float32: [M, N].

    `zeros` [M, 1] int32 are those of quantize_input_asymmetric, for int8 alone.
    For what quantizes beside other work. Takes weights that a row for 8-bit activations or the
    `reference` row prepared, with one input scale for each row of x; returns the weight's
    activation dtype.
    """
    if weight.activation is None or weight.activation.per == "group":
        raise KernelError("linear_codes weight", "expected one with 8-bit inputs, scaled by row")
    wanted = CODE_DTYPES[weight.activation.type]
    check_tensor("linear_codes codes", codes_MK, (None, weight.in_features), (wanted,), codes_MK)
    if codes_MK.device != weight.device:
        raise KernelError(
            "linear_codes codes", f"expected them on {weight.device}, found {codes_MK.device}"
        )
    rows = codes_MK.shape[0]
    check_tensor("linear_codes scales", scales_M1, (rows, 1), (torch.float32,), codes_MK)
    if bias is not None:
        check_tensor("linear_codes bias", bias, (weight.out_features,), (weight.dtype,), codes_MK)
    if zeros_M1 is not None:
        if weight.activation.type != "int":
            raise KernelError("linear_codes zeros", "expected None for float8 codes")
        check_tensor("linear_codes zeros", zeros_M1, (rows, 1), (torch.int32,), codes_MK)
    module = dispatch.linear_module(weight.kernel)
    return module.linear_codes(weight.sorted_inputs(codes_MK), scales_M1, weight, bias, zeros_M1)


def limb_form(weight: PreparedWeight, rows: int) -> LimbForm | None:
    """How `linear_limbs` takes so many rows of inputs as limbs; None: `linear` is as fast."""
    if weight.input_order is not None:
        return None
    form_of = getattr(dispatch.linear_module(weight.kernel), "limb_form", None)
    return None if form_of is None else form_of(weight, rows)


def linear_limbs(
    limbs: Limbs, weight: PreparedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`linear` of limbs in the form that `limb_form` names: [M, N] in the weight's dtype."""
    if limbs.words.device != weight.device or limbs.in_features != weight.in_features:
        raise KernelError(
            "linear_limbs limbs",
            f"expected those of {weight.in_features} inputs on {weight.device},"
            f" found {limbs.in_features} on {limbs.words.device}",
        )
    if bias is not None:
        check_tensor(
            "linear_limbs bias", bias, (weight.out_features,), (weight.dtype,), limbs.words
        )
    run = getattr(dispatch.linear_module(weight.kernel), "linear_limbs", None)
    if run is None or weight.input_order is not None:
        raise KernelError(
            "linear_limbs weight",
            f"{weight.kernel} takes no limbs" if run is None else "its inputs are reordered",
            "use ops.linear",
        )
    return run(limbs, weight, bias)


def linear_split_k(
    consumer: Consumer,
    x: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None = None,
) -> LinearOutput:
    """`linear` whose result one operation takes, and adds parts of K itself where that is faster.

    `reader` says which: add_rms_norm or add_rms_norm_quantize; or rope_write_kv_, by split_heads.
    Of rows for which `limb_form` makes limbs, nothing is left.
    """
    check_linear(x, weight, bias)
    module = dispatch.linear_module(weight.kernel)
    run = getattr(module, "linear_split_k", None)
    x = weight.sorted_inputs(x)
    return module.linear(x, weight, bias) if run is None else run(consumer, x, weight, bias)


def check_linear(x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None) -> None:
    """Raise KernelError unless x [..., K] and bias [N] or None fit a weight."""
    check_float("linear x", x)
    if x.ndim == 0 or x.shape[-1] != weight.in_features:
        raise KernelError(
            "linear x", f"expected [..., {weight.in_features}], found {list(x.shape)}"
        )
    if x.dtype != weight.dtype or x.device != weight.device:
        raise KernelError(
            "linear x",
            f"expected {weight.dtype} on {weight.device}, found {x.dtype} on {x.device}",
            "prepare the weight for this dtype and device",
        )
    if bias is not None:
        check_tensor("linear bias", bias, (weight.out_features,), (x.dtype,), x)
