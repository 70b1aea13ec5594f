"""Leaves of a loaded model: all tensors of its modules and prepared weights, by path.

Weights are in buffers, in private copies of kernels, and in dataclasses that hold both. The walk
follows all of these, so that no copy of a weight is missed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch

from qserve.model.blocks.linear import AdaptedLinear
from qserve.model.model_config import ModelConfig

Leaf = tuple[str, Any]  # path, tensor or plain value
# Plain values. Two models with equal settings have the same ones.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, PurePath, slice)
_TORCH = (torch.dtype, torch.device, torch.Size, torch.layout)
_SKIPPED = (ModelConfig, type)
ADAPTERS = "adapters"  # attribute of blocks that have LoRA adapters: experts, latent attention
# attributes of torch.nn.Module without weights, such as hooks
_MODULE_STATE = frozenset(torch.nn.Module().__dict__) - {"_parameters", "_buffers", "_modules"}


def leaves(root: object) -> Iterator[Leaf]:
    """Yield (path, value) of all tensors and plain values below an object, in a fixed order.

    Each tensor comes once. LoRA adapters around a layer are left out, and the path of the layer is
    the same as without adapters.
    """
    yield from _walk("", root, set())


def tensors(root: object) -> list[torch.Tensor]:
    """Return all tensors below an object."""
    return [leaf for _, leaf in leaves(root) if isinstance(leaf, torch.Tensor)]


def _walk(path: str, value: Any, seen: set[int]) -> Iterator[Leaf]:
    if isinstance(value, AdaptedLinear):
        value = value.base
    if isinstance(value, (*_PLAIN, *_TORCH)):
        yield path, value
        return
    if isinstance(value, _SKIPPED):
        return
    if isinstance(value, torch.Tensor | torch.nn.Module):
        if id(value) in seen:
            return
        seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, torch.nn.Module):
        for name, each in value.__dict__.items():
            if name in ("_parameters", "_buffers", "_modules"):
                for own, held in each.items():
                    yield from _walk(_join(path, own), held, seen)
            elif name not in _MODULE_STATE and name != ADAPTERS:
                yield from _walk(_join(path, name), each, seen)
    elif is_dataclass(value):
        for each in fields(value):
            yield from _walk(_join(path, each.name), getattr(value, each.name), seen)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _walk(_join(path, str(key)), each, seen)
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _walk(_join(path, str(number)), each, seen)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
