"""Groups a decoder's layers by the kernels that they launch, based on shapes and types."""

import copy
import dataclasses
from collections.abc import Mapping

import torch

from qserve.model.decoder import Decoder

# Types of values on which kernels may be specialized. Strings are left out: they are names, which
# differ between layers.
COUNTED = (int, float, bool, torch.dtype, torch.device, type(None))


def sample_of_layers(decoder: Decoder) -> tuple[Decoder, list[int]]:
    """Return a small decoder that launches every kernel of `decoder`, and its layer numbers.

    The small decoder shares all tensors. It always includes the first layer, which differs from the
    others because it has no residual input.
    """
    if not decoder.is_sampled:
        return decoder, [*range(len(decoder.layers))]
    first_of_kind: dict[object, int] = {}
    for number, layer in enumerate(decoder.layers):
        first_of_kind.setdefault((number == 0, _kind(layer, ())), number)
    numbers = sorted(first_of_kind.values())
    sample = copy.copy(decoder)
    # copy torch's table of submodules, which copy.copy shares
    sample._modules = dict(decoder._modules)
    sample.layers = torch.nn.ModuleList([decoder.layers[number] for number in numbers])
    return sample, numbers


def launch_kind(value: object) -> object:
    """Return a key that is equal for values that launch the same kernels.

    The repr of the key is the same in every process.
    """
    return _kind(value, ())


def _kind(value: object, path: tuple[int, ...]) -> object:
    """Implement `launch_kind`. `path`: ids of the enclosing objects."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), tuple(value.stride()), value.dtype
    if isinstance(value, COUNTED):
        return value
    if id(value) in path:
        return "itself"
    path = (*path, id(value))
    if isinstance(value, Mapping):
        return tuple((str(name), _kind(each, path)) for name, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(_kind(each, path) for each in value)
    if isinstance(value, torch.nn.Module):
        return type(value), _kind(vars(value), path)
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return type(value), _kind(fields, path)
    return type(value)
