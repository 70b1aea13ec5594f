"""Make a feed-forward wider with zeros until its groups fit. Knows Llama-like names.

gate and up get outputs of zero, down gets inputs of zero for them: silu(0) * 0 = 0, so the model
computes the same. config.json's intermediate_size grows with them, since every reader checks it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from formats.errors import CheckpointError
from formats.scheme import Scheme

KEY = "intermediate_size"
MULTIPLE = 32  # what every layout divides by
WIDENED = {"mlp.gate_proj": 0, "mlp.up_proj": 0, "mlp.down_proj": 1}  # local name -> dim


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
        dim = _dim(name)
        if dim is None:
            return shape
        return (self.after, shape[1]) if dim == 0 else (shape[0], self.after)

    def apply(self, tensor_name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A weight or a bias with its zeros; any other tensor is returned as it is."""
        module, _, leaf = tensor_name.rpartition(".")
        dim = _dim(module)
        if dim is None or leaf not in ("weight", "bias") or self.after == self.before:
            return tensor
        more = self.after - self.before
        if leaf == "bias":
            return torch.nn.functional.pad(tensor, (0, more)) if dim == 0 else tensor
        return torch.nn.functional.pad(tensor, (0, more) if dim == 1 else (0, 0, 0, more))


def make_padding(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, int]], scheme: Scheme
) -> Padding:
    """The least width that the scheme's groups and all layouts divide. Raises CheckpointError."""
    before = config.get(KEY)
    for name, shape in shapes.items():
        dim = _dim(name)
        if dim is not None and shape[dim] != before:
            raise CheckpointError(
                name, f"has {shape[dim]} features, config.json's {KEY} is {before!r}"
            )
    if not isinstance(before, int) or not any(_dim(name) is not None for name in shapes):
        raise CheckpointError(
            f"config.json {KEY}", "says no width that could grow", "quantize without --pad"
        )
    length = max(1, scheme.weight.group_size)
    multiple = math.lcm(MULTIPLE, length)
    return Padding(before=before, after=-(-before // multiple) * multiple)


def _dim(module: str) -> int | None:
    """Which dim of a linear's weight counts intermediate features."""
    return next((dim for local, dim in WIDENED.items() if module.endswith(f".{local}")), None)
