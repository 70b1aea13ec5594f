"""decode_together: decodes linears of equal shape and scheme as one large linear.

A mixture of experts has tens of thousands of small linears. Decoding each alone costs more time in
kernel launches and in waiting for checks than in work on the data.
"""

from collections.abc import Mapping, Sequence

import torch

from formats.errors import CheckpointError, SchemeError
from formats.in_memory.slices import split_outputs
from formats.in_memory.weights import Weight
from formats.layouts import decode_linear, layout_of
from formats.quant_config import QuantConfig

STATED_SHAPE = "weight_shape"  # [N, K], beside packed codes of compressed-tensors


def decode_together(
    tensors: Mapping[str, Mapping[str, torch.Tensor]], config: QuantConfig
) -> list[Weight] | None:
    """Decode linears in one call; return their weights in order, or None if that is not possible.

    tensors: module name -> tensors of the module, by the field names of `decode_linear`

    It is not possible for layouts without `output_axes`, for linears whose schemes, shapes or
    common tensors differ, and if `decode_linear` refuses the joint linear. The caller then decodes
    each linear alone, which raises the error with the linear's name.
    """
    axes, modules = layout_of(config).output_axes, list(tensors)
    schemes = {config.scheme_for(module) for module in modules}
    if not axes or len(schemes) != 1 or None in schemes:
        return None
    joint = _joint([tensors[module] for module in modules], axes)
    if joint is None:
        return None
    try:
        return split_outputs(decode_linear(modules[0], joint, config), len(modules))
    except (CheckpointError, SchemeError, ValueError):
        return None


def _joint(
    linears: Sequence[Mapping[str, torch.Tensor]], axes: Mapping[str, int]
) -> dict[str, torch.Tensor] | None:
    """Return the tensors of a linear with the outputs of all; None: they do not fit together."""
    first, found = linears[0], {}
    if any(linear.keys() != first.keys() for linear in linears):
        return None
    for field, tensor in first.items():
        stored = [linear[field] for linear in linears]
        if any((each.shape, each.dtype) != (tensor.shape, tensor.dtype) for each in stored):
            return None
        if field in axes and tensor.ndim and tensor.shape != (1,):
            found[field] = torch.cat(stored, axes[field])
        elif all(torch.equal(each, tensor) for each in stored[1:]):
            found[field] = tensor
        else:
            return None
    if STATED_SHAPE in found:
        factor = found[STATED_SHAPE].new_tensor([len(linears), 1])
        found[STATED_SHAPE] = found[STATED_SHAPE] * factor
    return found
