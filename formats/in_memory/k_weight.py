"""In-memory form of a weight in GGUF's K-quants: the blocks of the file, unchanged.

Solvers choose its codes on a grid (formats/gguf/k_quants/grid.py). No kernel runs it: blocks of a
file that is read are dequantized at load. Legend: N outputs, K inputs.
"""

from dataclasses import dataclass, replace

import torch

from formats.errors import CheckpointError
from formats.gguf.block_types import BY_NAME, BlockType
from formats.gguf.blocks import decode_rows
from formats.gguf.k_quants.grid import KGrid
from formats.gguf.k_quants.search import choose_grid
from formats.numerics.affine import rows_at_once
from formats.scheme import K_TYPES, QuantSpec, Scheme


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KWeight:
    """Weight [N, K] in blocks of 256 inputs with quantized scales."""

    bytes_NX: torch.Tensor  # uint8, a row of the file for each output
    spec: QuantSpec  # its type is one of K_TYPES
    activation: None = None
    input_scale: None = None

    @classmethod
    def from_float(
        cls,
        weight_NK: torch.Tensor,
        spec: QuantSpec,
        name: str = "weight",
        importance_K: torch.Tensor | None = None,
    ) -> "KWeight":
        """Round to nearest on the grid of choose_grid. Raises its errors."""
        grid = choose_grid(weight_NK, spec, name, importance_K)
        rows = rows_at_once(weight_NK.shape[1])
        parts = []
        for start in range(0, len(weight_NK), rows):
            own = grid.rows(start, start + rows)
            parts.append(own.blocks(own.nearest(weight_NK[start : start + rows])))
        return cls(bytes_NX=torch.cat(parts), spec=spec)

    @classmethod
    def from_codes(cls, codes_NK: torch.Tensor, grid: KGrid) -> "KWeight":
        """Store a solver's codes unchanged."""
        return cls(bytes_NX=grid.blocks(codes_NK), spec=grid.spec)

    @property
    def kind(self) -> BlockType:
        return BY_NAME[self.spec.type.upper()]

    @property
    def out_features(self) -> int:
        return self.bytes_NX.shape[0]

    @property
    def in_features(self) -> int:
        return self.bytes_NX.shape[1] // self.kind.num_bytes * self.kind.length

    @property
    def input_order(self) -> None:
        """None: blocks never reorder inputs."""
        return None

    @property
    def scheme(self) -> Scheme:
        return Scheme(weight=self.spec)

    @property
    def device(self) -> torch.device:
        return self.bytes_NX.device

    def check(self, name: str = "weight") -> None:
        """Raise CheckpointError, with `name`, unless the bytes are whole rows of finite weights."""
        bytes_NX = self.bytes_NX
        if bytes_NX.ndim != 2 or bytes_NX.dtype != torch.uint8 or not bytes_NX.numel():
            raise CheckpointError(
                name, f"expected bytes [N, row], found {bytes_NX.dtype} {list(bytes_NX.shape)}"
            )
        if bytes_NX.shape[1] % self.kind.num_bytes:
            raise CheckpointError(
                name, f"its rows of {bytes_NX.shape[1]} bytes are no whole blocks of {self.scheme}"
            )
        if not torch.isfinite(self.dequantize()).all():
            raise CheckpointError(name, "its weights contain NaN or infinity", "fetch it again")

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weights [N, K] in `dtype`, as gguf-py computes them in float32."""
        return decode_rows(self.bytes_NX, self.kind, self.in_features).to(dtype)

    def to(self, device: torch.device | str) -> "KWeight":
        return replace(self, bytes_NX=self.bytes_NX.to(device))


def is_k_quant(spec: QuantSpec) -> bool:
    """Return True if a spec's weights are blocks of K_TYPES."""
    return spec.type in K_TYPES
