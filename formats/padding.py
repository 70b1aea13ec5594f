"""Make a feed-forward wider with zeros until its groups fit.

gate and up get outputs of zero, down gets inputs of zero for them: silu(0) * 0 = 0, so the model
computes the same. config.json's intermediate_size grows with them, since every reader checks it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from formats.errors import CheckpointError
from formats.families import FAMILIES
from formats.scheme import Scheme

KEY = "intermediate_size"
MULTIPLE = 32  # what every layout divides by


class Widened(NamedTuple):
    """Where a linear's weight counts intermediate features."""

    dim: int
    parts: int  # times that it does: 2 where gate and up are stored as one matrix


# by the linear's name below its layer
WIDENED = {
    linear.name: Widened(0, len(linear.outputs)) if set(linear.outputs) == {KEY} else Widened(1, 1)
    for family in FAMILIES.values()
    for linear in family.linears
    if KEY in (*linear.outputs, linear.inputs)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """From `before` intermediate features to `after`."""

    before: int
    after: int

    @property
    def config_changes(self) -> dict[str, Any]:
        return {KEY: self.after} if self.after != self.before else {}

    def shape(self, name: str, shape: tuple[int, int]) -> tuple[int, int]:
        """The shape of a linear's weight afterwards."""
        widened = _widened(name)
        if widened is None:
            return shape
        features = widened.parts * self.after
        return (features, shape[1]) if widened.dim == 0 else (shape[0], features)

    def apply(self, tensor_name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A weight or a bias with its zeros; any other tensor is returned as it is."""
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
    """The least width that the scheme's groups and all layouts divide. Raises CheckpointError."""
    before = config.get(KEY)
    for name, shape in shapes.items():
        widened = _widened(name)
        if widened is None:
            continue
        if not isinstance(before, int) or shape[widened.dim] != widened.parts * before:
            found = shape[widened.dim] // widened.parts
            raise CheckpointError(name, f"has {found} features, config.json's {KEY} is {before!r}")
    if not isinstance(before, int) or not any(_widened(name) is not None for name in shapes):
        raise CheckpointError(
            f"config.json {KEY}", "says no width that could grow", "quantize without --pad"
        )
    length = max(1, scheme.weight.group_size)
    multiple = math.lcm(MULTIPLE, length)
    return Padding(before=before, after=-(-before // multiple) * multiple)


def _widened(module: str) -> Widened | None:
    """None: no dim of a linear's weight counts intermediate features."""
    return next((row for local, row in WIDENED.items() if module.endswith(f".{local}")), None)
