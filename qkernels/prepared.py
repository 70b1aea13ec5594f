"""A weight in the form that one kernel reads. Knows not what its tensors mean.

Made once at load, never written to a file: files and state_dict hold the GPTQ tensors.
"""

from dataclasses import dataclass, replace

import torch

from formats.scheme import QuantSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedWeight:
    """One kernel's private copy of a weight [N, K], for activations of `dtype`."""

    kernel: str  # the row of qkernels.dispatch that made it and that must run it
    tensors: dict[str, torch.Tensor]
    spec: QuantSpec
    out_features: int
    in_features: int
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def to(self, device: torch.device | str) -> "PreparedWeight":
        """The same on another device of the same type."""
        tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return replace(self, tensors=tensors)
