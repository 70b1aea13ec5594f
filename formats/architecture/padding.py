"""Pad feed-forwards with zeros until their groups fit.

gate and up get zero outputs, and down gets zero inputs for them. Every activation function maps 0
to 0, so the model computes the same. The width in config.json (`Family.inner_key`) grows, too,
because readers check it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from formats.errors import CheckpointError
from formats.families import FAMILIES, family_of
from formats.scheme import Scheme

KEY = "intermediate_size"
MULTIPLE = 32  # divisor that every layout requires


class Widened(NamedTuple):
    """Dimension of a linear's weight that counts intermediate features."""

    dim: int
    parts: int  # number of fused matrices: 2 if gate and up are stored as one


# linear's name below its layer -> dimension to pad
WIDENED = {
    linear.name: Widened(0, len(linear.outputs)) if set(linear.outputs) == {KEY} else Widened(1, 1)
    for family in FAMILIES.values()
    for linear in family.linears
    if KEY in (*linear.outputs, linear.inputs)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """Padding from `before` to `after` intermediate features."""

    before: int
    after: int
    key: str = KEY  # key of config.json

    @property
    def config_changes(self) -> dict[str, Any]:
        return {self.key: self.after} if self.after != self.before else {}

    def shape(self, name: str, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of a linear's weight after padding."""
        widened = _widened(name)
        if widened is None:
            return shape
        features = widened.parts * self.after
        return (features, shape[1]) if widened.dim == 0 else (shape[0], features)

    def apply(self, tensor_name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a weight or bias with zeros added; other tensors are unchanged."""
        module, _, leaf = tensor_name.rpartition(".")
        widened = _widened(module)
        if widened is None or leaf not in ("weight", "bias") or self.after == self.before:
            return tensor
        if leaf == "bias" and widened.dim == 1:
            return tensor
        pad = torch.nn.functional.pad
        more = self.after - self.before
        if widened.dim == 1:
            return pad(tensor, (0, more))
        split = tensor.unflatten(0, (widened.parts, self.before))
        return pad(split, (0, more) if leaf == "bias" else (0, 0, 0, more)).flatten(0, 1)


def make_padding(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, int]], scheme: Scheme
) -> Padding:
    """Find the smallest width that fits the scheme's groups and all layouts.

    Raises CheckpointError.
    """
    key = _key(config)
    before = config.get(key)
    for name, shape in shapes.items():
        widened = _widened(name)
        if widened is None:
            continue
        if not isinstance(before, int) or shape[widened.dim] != widened.parts * before:
            found = shape[widened.dim] // widened.parts
            raise CheckpointError(
                name,
                f"has {found} features, config.json's {key} is {before!r}",
                "copy config.json from the same checkpoint as the weights",
            )
    if not isinstance(before, int) or not any(_widened(name) is not None for name in shapes):
        raise CheckpointError(
            f"config.json {key}", "states no width for `pad` to enlarge", "quantize without `pad`"
        )
    length = max(1, scheme.weight.group_size)
    multiple = math.lcm(MULTIPLE, length)
    return Padding(before=before, after=-(-before // multiple) * multiple, key=key)


def _key(config: Mapping[str, Any]) -> str:
    """Return the family's config key of the width."""
    family = family_of(config)
    return KEY if family is None else family.inner_key


def _widened(module: str) -> Widened | None:
    """Return the dim to pad; None: no dim of the weight counts intermediate features."""
    return next((row for local, row in WIDENED.items() if module.endswith(f".{local}")), None)
