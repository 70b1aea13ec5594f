"""QuantLinear as one operation inside torch.compile.

A compiled graph calls the layer instead of its code: the layer prepares its weight and chooses its
kernel at run time, as without a compiler. The graph names a layer by its key, a number in a CPU
tensor: a graph that was compiled for one layer then also serves others of its shape.
"""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from qkernels.errors import KernelError

if TYPE_CHECKING:
    from qkernels.quant_linear import QuantLinear

_KEYS = itertools.count()
_LAYERS: "WeakValueDictionary[int, QuantLinear]" = WeakValueDictionary()


class LayerKey:
    """Number that names a layer in compiled graphs of this process.

    An object of its own: who collects the tensors of a model must not take it for a weight.
    """

    def __init__(self, layer: "QuantLinear") -> None:
        number = next(_KEYS)
        _LAYERS[number] = layer
        with torch.inference_mode(False):  # backward could not use a tensor of inference mode
            self.number = torch.tensor(number, device="cpu")


def compiled_linear(x: torch.Tensor, layer: "QuantLinear", key: LayerKey) -> torch.Tensor:
    """Return layer(x). The compiler sees one operation that reads x and the layer's tensors."""
    return _quant_linear(x, layer.stored_tensors(), key.number, layer.out_features)


@torch.library.custom_op("qserve::quant_linear", mutates_args=())
def _quant_linear(
    x: torch.Tensor, stored: Sequence[torch.Tensor], key: torch.Tensor, out_features: int
) -> torch.Tensor:
    with torch.no_grad():
        return _layer(stored, key).forward(x.detach()).contiguous()


@torch.library.custom_op("qserve::quant_linear_grad", mutates_args=())
def _quant_linear_grad(
    grad: torch.Tensor, stored: Sequence[torch.Tensor], key: torch.Tensor, in_features: int
) -> torch.Tensor:
    return grad @ _layer(stored, key).gradient_weight(grad.dtype, grad.device)


@_quant_linear.register_fake
def _(
    x: torch.Tensor, stored: Sequence[torch.Tensor], key: torch.Tensor, out_features: int
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


@_quant_linear_grad.register_fake
def _(
    grad: torch.Tensor, stored: Sequence[torch.Tensor], key: torch.Tensor, in_features: int
) -> torch.Tensor:
    return grad.new_empty((*grad.shape[:-1], in_features))


@_quant_linear.register_vmap
def _(
    info,
    in_dims: tuple,
    x: torch.Tensor,
    stored: Sequence[torch.Tensor],
    key: torch.Tensor,
    out_features: int,
) -> tuple[torch.Tensor, int]:
    return _quant_linear(x.movedim(in_dims[0], 0), stored, key, out_features), 0


def _setup_context(ctx, inputs: tuple, output: torch.Tensor) -> None:
    x, stored, key, _ = inputs
    ctx.in_features = x.shape[-1]
    ctx.save_for_backward(key, *stored)  # not x: the gradient does not depend on it


def _backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, list[None], None, None]:
    key, *stored = ctx.saved_tensors
    grad_x = _quant_linear_grad(grad, stored, key, ctx.in_features)
    return grad_x, [None] * len(stored), None, None


_quant_linear.register_autograd(_backward, setup_context=_setup_context)


def _layer(stored: Sequence[torch.Tensor], key: torch.Tensor) -> "QuantLinear":
    """Return the layer of that key, or a copy if the graph computed other tensors for it."""
    layer = _LAYERS.get(int(key))
    if layer is None:
        raise KernelError(
            "compiled graph", "its QuantLinear no longer exists", "compile the model again"
        )
    own = layer.stored_tensors()
    same = len(own) == len(stored) and all(
        mine.data_ptr() == given.data_ptr() for mine, given in zip(own, stored, strict=True)
    )
    return layer if same else layer.with_tensors(stored)
