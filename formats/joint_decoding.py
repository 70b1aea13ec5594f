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
from formats.numerics.bits import code_multiple
from formats.quant_config import QuantConfig
from formats.scheme import QuantSpec

STATED_SHAPE = "weight_shape"  # [N, K], stored with packed codes of compressed-tensors


def decode_together(
    tensors: Mapping[str, Mapping[str, torch.Tensor]], config: QuantConfig
) -> list[Weight] | None:
    """Decode linears in one call. Return their weights in order, or None if that is impossible.

    tensors: module name -> tensors of the module, by the field names of `decode_linear`

    The layout needs `output_axes`. The linears must agree in scheme, shapes and common tensors, and
    packed zero points must fill whole words. None is also returned if `decode_linear` refuses the
    joint linear: the caller then decodes each linear alone, and the error names the wrong one.
    """
    axes, modules = layout_of(config).output_axes, list(tensors)
    schemes = {config.scheme_for(module) for module in modules}
    if not axes or len(schemes) != 1 or None in schemes:
        return None
    joint = _joint([tensors[module] for module in modules], axes)
    if joint is None:
        return None
    try:
        weights = split_outputs(decode_linear(modules[0], joint, config), len(modules))
    except (CheckpointError, SchemeError, ValueError):
        return None
    return weights if _fills_words(weights[0].out_features, weights[0].spec) else None


def _fills_words(rows: int, spec: QuantSpec) -> bool:
    """Return True if zero points of `rows` outputs, packed along the outputs, fill whole words.

    Otherwise each linear's last word has padding, which the joint linear would read as zero points.
    """
    return spec.type != "int" or rows % code_multiple(spec.bits) == 0


def _are_equal(tensors: Sequence[torch.Tensor]) -> bool:
    """Compare all tensors in one operation: on a GPU the host waits for each comparison."""
    stacked = torch.stack(tensors)
    return bool((stacked == stacked[0]).all())


def _joint(
    linears: Sequence[Mapping[str, torch.Tensor]], axes: Mapping[str, int]
) -> dict[str, torch.Tensor] | None:
    """Return the tensors of a linear with the outputs of all; None: they do not fit together."""
    first = linears[0]
    if any(linear.keys() != first.keys() for linear in linears):
        return None
    stored = {field: [linear[field] for linear in linears] for field in first}
    by_output = {
        field: axes[field]
        for field, tensor in first.items()
        if field in axes and tensor.ndim and tensor.shape != (1,)
    }
    for field, tensors in stored.items():
        if len({(tensor.shape, tensor.dtype) for tensor in tensors}) != 1:
            return None
        if field not in by_output and not _are_equal(tensors):
            return None
    found = {
        field: torch.cat(tensors, by_output[field]) if field in by_output else tensors[0].clone()
        for field, tensors in stored.items()
    }
    if STATED_SHAPE in found:
        factor = found[STATED_SHAPE].new_tensor([len(linears), 1])
        found[STATED_SHAPE] = found[STATED_SHAPE] * factor
    return found
