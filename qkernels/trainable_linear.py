"""TrainableQuantLinear: a float weight that is trained as the served layer rounds it.

The forward pass rounds the weight to nearest, by the code of `qserve quantize --recipe rtn`, and
runs the kernel of the served layer. The backward pass is straight-through: rounding counts as the
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
from qkernels.errors import KernelError
from qkernels.linear.prepared import PreparedWeight

# element size -> integers that read the bits of a float
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class TrainableQuantLinear(nn.Linear):
    """y = x W'^T + bias, where W' is the float weight rounded to a scheme.

    The output has the bits of the served layer: a QuantLinear, or a linear of `qserve serve
    --quantization`. `weight` and `bias` are float parameters, and the state_dict is that of
    nn.Linear. Gradients: x gets grad W', the weight gets grad^T x' (x' is x, rounded if the scheme
    has 8-bit activations), as if rounding were the identity.
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
        """A layer with the initial weights of nn.Linear.

        `kernel` requests a kernel, as ops.prepare_weight does; "fixed_order" is that of
        `qserve serve --batch-invariant`.
        """
        parsed = _checked(scheme, "TrainableQuantLinear", out_features, in_features)
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._start(parsed, kernel, "weight")

    def _start(self, scheme: Scheme, kernel: str | None, name: str) -> None:
        self.scheme, self.kernel, self._name = scheme, kernel, name
        self._stamp: tuple[Any, ...] | None = None  # of the weight that is rounded
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
        """Take over a torch Linear's own parameters, which an optimizer may have already.

        `name` is what errors call the layer.
        """
        if not isinstance(linear, nn.Linear):
            raise KernelError(name, f"expected a torch.nn.Linear, found {type(linear).__name__}")
        parsed = _checked(scheme, name, linear.out_features, linear.in_features)
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = linear.in_features, linear.out_features
        layer.weight, layer.bias = linear.weight, linear.bias
        layer._start(parsed, kernel, name)
        return layer.train(linear.training)

    def rounded_weight(self) -> Weight:
        """Codes and scales of the weight as it is now.

        It is rounded again only if its bits changed, also where `.data` was written to. On a GPU
        the test waits for the weight. Raises CheckpointError on NaN, infinity, or numbers that the
        scheme cannot hold.
        """
        weight_NK = self.weight
        stamp = (
            *(weight_NK.device, weight_NK.dtype, weight_NK.data_ptr()),
            None if weight_NK.is_inference() else weight_NK._version,
            _sum_of_bits(weight_NK),
        )
        if self._rounded is None or stamp != self._stamp:
            self._prepared = None
            # tensors made in inference mode could not serve a later backward
            with torch.inference_mode(False), torch.no_grad(), _no_autocast(weight_NK):
                self._rounded = rounded(weight_NK.detach(), self.scheme, self._name)
            self._stamp = stamp
        return self._rounded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] to [..., N], in x's dtype, or in autocast's."""
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
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
        """Copies and pickles leave out what can be made again."""
        made = {"_stamp": None, "_rounded": None, "_prepared": None}
        return {**super().__getstate__(), **made}


class _StraightThrough(torch.autograd.Function):
    """The product of a rounded weight, and its gradients as if rounding were the identity."""

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
        with _no_autocast(x):
            return ops.linear(x, prepared, None if bias_N is None else bias_N.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        with _no_autocast(x):
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
    """Return x as its 8-bit codes and scales state it, in x's dtype."""
    codes_MK, scales_MS = quantize_input(x_MK, activation, None)
    groups_MSL = codes_MK.float().unflatten(1, (scales_MS.shape[1], -1)) * scales_MS[..., None]
    return groups_MSL.flatten(1)[:, : x_MK.shape[1]].to(x_MK.dtype)


def _checked(
    scheme: SchemeName | str | Scheme, name: str, out_features: int, in_features: int
) -> Scheme:
    """Return the scheme. Raises SchemeError if it cannot be trained, or not with this shape."""
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
    """Sum of the weight's bit patterns: other after any step of an optimizer.

    A version counter alone does not see writes to `.data`, nor those of sharded training.
    """
    words = weight_NK.detach().contiguous().view(BITS[weight_NK.element_size()])
    return int(words.sum(dtype=torch.int64))


def _no_autocast(tensor: torch.Tensor) -> torch.autocast:
    """Exact integer sums and float32 scales must not be computed in autocast's dtype."""
    return torch.autocast(tensor.device.type, enabled=False)
