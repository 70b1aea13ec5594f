"""TrainableQuantLinear: a linear layer whose float weight is trained as it will be served.

Forward rounds the weight to nearest with the code of `qserve quantize --recipe rtn` and runs the
kernel of the served layer. Backward is straight-through: the gradient treats rounding as the
identity. Legend: M rows of x, N outputs, K inputs.
"""

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from formats.errors import SchemeError
from formats.in_memory.weights import Weight
from formats.names import SchemeName
from formats.numerics.activation import quantize_input
from formats.scheme import ActivationSpec, Scheme
from formats.weight_digest import rounded
from qkernels import ops
from qkernels.autocast import autocast_input, no_autocast
from qkernels.errors import KernelError
from qkernels.linear.prepared import PreparedWeight

# bytes of a float -> integer dtype of the same size
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class TrainableQuantLinear(nn.Linear):
    """y = x W'^T + bias, where W' is the float weight rounded to a scheme.

    The output has the same bits as the served layer: a QuantLinear, or a linear of `qserve serve
    --quantization`. `weight` and `bias` are float parameters; the state_dict is the one of
    nn.Linear. Gradients are straight-through: x gets grad W', the weight gets grad^T x', where x'
    is x after the scheme's 8-bit rounding, if any.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scheme: SchemeName | str | Scheme,
        bias: bool = True,
        *,
        kernel: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create a layer with nn.Linear's initial weights.

        `kernel` requests a kernel, as in ops.prepare_weight; "fixed_order" is the kernel of `qserve
        serve --batch-invariant`.
        """
        parsed = _checked(scheme, "TrainableQuantLinear", out_features, in_features)
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._start(parsed, kernel, "weight")

    def _start(self, scheme: Scheme, kernel: str | None, name: str) -> None:
        self.scheme, self.kernel, self._name = scheme, kernel, name
        self._stamp: tuple[Any, ...] | None = None  # identifies the weight in `_rounded`
        self._rounded: Weight | None = None
        self._prepared: PreparedWeight | None = None

    @classmethod
    def from_float(
        cls,
        linear: nn.Linear,
        scheme: SchemeName | str | Scheme,
        *,
        kernel: str | None = None,
        name: str = "weight",
    ) -> "TrainableQuantLinear":
        """Share the parameters of a torch Linear, so an existing optimizer keeps working.

        `name` is the layer's name in errors.
        """
        if not isinstance(linear, nn.Linear):
            raise KernelError(
                name, f"expected a torch.nn.Linear, found {type(linear).__name__}", "pass a Linear"
            )
        parsed = _checked(scheme, name, linear.out_features, linear.in_features)
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = linear.in_features, linear.out_features
        layer.weight, layer.bias = linear.weight, linear.bias
        layer._start(parsed, kernel, name)
        return layer.train(linear.training)

    def rounded_weight(self) -> Weight:
        """Return codes and scales of the current weight.

        The weight is rounded again only if its bits changed, which includes writes to `.data`. On a
        GPU this check waits for the weight. Raises CheckpointError on NaN, infinity, or values that
        the scheme cannot hold.
        """
        weight_NK = self.weight
        stamp = (
            *(weight_NK.device, weight_NK.dtype, weight_NK.data_ptr()),
            None if weight_NK.is_inference() else weight_NK._version,
            _sum_of_bits(weight_NK),
        )
        if self._rounded is None or stamp != self._stamp:
            self._prepared = None
            # a later backward could not use tensors made in inference mode
            with torch.inference_mode(False), torch.no_grad(), no_autocast(weight_NK):
                self._rounded = rounded(weight_NK.detach(), self.scheme, self._name)
            self._stamp = stamp
        return self._rounded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W'^T + bias: x [..., K] to [..., N], in x's dtype or autocast's."""
        x = autocast_input(x)
        weight = self.rounded_weight()
        prepared = self._prepared
        if prepared is None or (prepared.dtype, prepared.device) != (x.dtype, x.device):
            with torch.inference_mode(False), torch.no_grad():
                prepared = ops.prepare_weight(weight, x.dtype, x.device, self.kernel)
            self._prepared = prepared
        return _StraightThrough.apply(x, self.weight, self.bias, weight, prepared)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scheme={self.scheme}"

    def __getstate__(self) -> dict[str, Any]:
        """Leave the rounded and prepared weights out of copies and pickles."""
        made = {"_stamp": None, "_rounded": None, "_prepared": None}
        return {**super().__getstate__(), **made}


class _StraightThrough(torch.autograd.Function):
    """Product with a rounded weight, with the straight-through gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight_NK: torch.Tensor,
        bias_N: torch.Tensor | None,
        rounded: Weight,
        prepared: PreparedWeight,
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.rounded, ctx.dtype = rounded, weight_NK.dtype
        ctx.bias_dtype = None if bias_N is None else bias_N.dtype
        with no_autocast(x):
            return ops.linear(x, prepared, None if bias_N is None else bias_N.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        with no_autocast(x):
            grad_MN = grad.reshape(-1, grad.shape[-1])
            if ctx.needs_input_grad[0]:
                weight_NK = ctx.rounded.dequantize(x.dtype)
                grad_x = (grad_MN @ weight_NK.to(x.device)).view(x.shape)
            if ctx.needs_input_grad[1]:
                x_MK = x.reshape(-1, x.shape[-1])
                if ctx.rounded.activation is not None:
                    x_MK = _rounded_input(x_MK, ctx.rounded.activation)
                grad_weight = (grad_MN.t() @ x_MK).to(ctx.dtype)
            if ctx.needs_input_grad[2]:
                grad_bias = grad_MN.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None


def _rounded_input(x_MK: torch.Tensor, activation: ActivationSpec) -> torch.Tensor:
    """Return x rounded to its 8-bit codes and scales, in x's dtype."""
    codes_MK, scales_MS = quantize_input(x_MK, activation, None)
    groups_MSL = codes_MK.float().unflatten(1, (scales_MS.shape[1], -1)) * scales_MS[..., None]
    return groups_MSL.flatten(1)[:, : x_MK.shape[1]].to(x_MK.dtype)


def _checked(
    scheme: SchemeName | str | Scheme, name: str, out_features: int, in_features: int
) -> Scheme:
    """Parse the scheme. Raises SchemeError if it cannot be trained or does not fit the shape."""
    parsed = Scheme.parse(scheme)
    if parsed.activation is not None and not parsed.activation.dynamic:
        raise SchemeError(
            name,
            f"{parsed} has static scales of activations, which come from calibration",
            f"train with {str(parsed).removesuffix('-static')}, whose scales are dynamic",
        )
    parsed.weight.check_shape(name, out_features, in_features)
    return parsed


def _sum_of_bits(weight_NK: torch.Tensor) -> int:
    """Return the sum of the weight's bit patterns, which in practice changes with any update.

    A version counter does not see writes to `.data` or the writes of sharded training.
    """
    words = weight_NK.detach().contiguous().view(BITS[weight_NK.element_size()])
    return int(words.sum(dtype=torch.int64))
