"""In-memory form of weights whose codes no kernel takes: floats, dequantized at load.

It is used for bitsandbytes' 4-bit tables and for codes with non-integer zero points. The values are
exactly those that the original tool computes with; they take the memory of a float weight. Legend:
N outputs, K inputs.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from formats.errors import CheckpointError, weight_error
from formats.in_memory.packed import SCALE_DTYPES
from formats.scheme import DENSE_TYPES, QuantSpec, Scheme


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DenseWeight:
    """Weight [N, K] in the dtype that its tool computes with; `spec` describes the file."""

    weight_NK: torch.Tensor
    spec: QuantSpec
    activation: None = None
    input_scale: None = None
    input_order: ClassVar[None] = None  # these formats never reorder inputs

    @property
    def out_features(self) -> int:
        return self.weight_NK.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight_NK.shape[1]

    @property
    def scheme(self) -> Scheme:
        return Scheme(weight=self.spec)

    @property
    def device(self) -> torch.device:
        return self.weight_NK.device

    def check(self, name: str = "weight") -> None:
        """Raise CheckpointError, with `name`, unless the weight is a matrix of finite floats."""
        weight_NK = self.weight_NK
        if weight_NK.ndim != 2 or weight_NK.dtype not in SCALE_DTYPES or not weight_NK.numel():
            raise weight_error(
                name, f"expected floats [N, K], found {weight_NK.dtype} {list(weight_NK.shape)}"
            )
        if not torch.isfinite(weight_NK).all():
            raise CheckpointError(name, "its weights contain NaN or infinity", "download it again")

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weights [N, K] in `dtype`."""
        return self.weight_NK.to(dtype)

    def to(self, device: torch.device | str) -> "DenseWeight":
        return replace(self, weight_NK=self.weight_NK.to(device))


def is_dense(spec: QuantSpec) -> bool:
    """Return True if weights of this spec are read as floats."""
    return spec.type in DENSE_TYPES
