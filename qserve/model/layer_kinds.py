"""Which layers of a decoder launch the same kernels. Knows shapes and types, not what layers do."""

import copy
import dataclasses
from collections.abc import Mapping

import torch

from qserve.model.decoder import Decoder

# A kernel may be compiled for these. Texts are names, of which each layer has its own.
COUNTED = (int, float, bool, torch.dtype, torch.device, type(None))


def sample_of_layers(decoder: Decoder) -> tuple[Decoder, list[int]]:
    """A decoder of few layers that launches every kernel that `decoder` does, and their numbers.

    It shares all tensors. The first layer is there for itself: it has no residual yet.
    """
    first_of_kind: dict[object, int] = {}
    for number, layer in enumerate(decoder.layers):
        first_of_kind.setdefault((number == 0, _kind(layer, ())), number)
    numbers = sorted(first_of_kind.values())
    sample = copy.copy(decoder)
    sample._modules = dict(decoder._modules)  # torch's own table of submodules, else shared
    sample.layers = torch.nn.ModuleList([decoder.layers[number] for number in numbers])
    return sample, numbers


def _kind(value: object, path: tuple[int, ...]) -> object:
    """Equal for values that make equal launches. `path`: ids of what holds the value."""
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
