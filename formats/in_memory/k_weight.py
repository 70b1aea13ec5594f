"""In-memory form of weights in blocks of a GGUF file (BLOCK_TYPES): the blocks, unchanged.

Solvers choose codes of K-quants on a grid (formats/gguf/k_quants/grid.py); kernels read codes and
grid. Legend: N outputs, K inputs.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from formats.errors import ONE_SCHEME, CheckpointError, weight_error
from formats.gguf.block_types import BY_NAME, BlockType
from formats.gguf.blocks import decode_rows
from formats.gguf.k_quants.grid import KGrid, read_blocks
from formats.gguf.k_quants.search import choose_grid
from formats.numerics.affine import rows_at_once
from formats.scheme import BLOCK_TYPES, K_TYPES, QuantSpec, Scheme

MIN_INPUTS = 32  # the inputs of a weight begin and end at multiples of this
# type -> float16 numbers of a block: (byte, value in random weights with standard deviation 1)
_FLOATS: dict[str, tuple[tuple[int, float], ...]] = {
    "q4_k": ((0, 1 / 256), (2, 7.5 / 256)),
    "q5_k": ((0, 1 / 512), (2, 15.5 / 512)),
    "q6_k": ((208, 1 / 1369),),
    "q2_k": ((80, 1 / 13.9), (82, 1.5 / 13.9)),
    "q3_k": ((108, 1 / 43.3),),
    "iq4_xs": ((0, 1 / 1246),),
    "q4_1": ((0, 1 / 4.6), (2, -7.5 / 4.6)),
    "q5_1": ((0, 1 / 9.2), (2, -15.5 / 9.2)),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KWeight:
    """Weight [N, K] in blocks of a GGUF file.

    `inputs` is set for a tensor-parallel shard that begins or ends inside a block: it is the range
    of the shard's inputs, counted from the first input of the stored blocks.
    """

    bytes_NX: torch.Tensor  # uint8, one row of the file per output
    spec: QuantSpec  # its type is one of BLOCK_TYPES
    inputs: tuple[int, int] | None = None  # (start, stop); None: all
    activation: None = None
    input_scale: None = None
    input_order: ClassVar[None] = None  # blocks never reorder inputs

    @classmethod
    def from_float(
        cls,
        weight_NK: torch.Tensor,
        spec: QuantSpec,
        name: str = "weight",
        importance_K: torch.Tensor | None = None,
    ) -> "KWeight":
        """Round to nearest on the grid of choose_grid, for K_TYPES.

        Raises the errors of choose_grid.
        """
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

    @classmethod
    def random(
        cls, shape: tuple[int, int], spec: QuantSpec, std: float, generator: torch.Generator
    ) -> "KWeight":
        """Return random blocks on the generator's device, for benchmarks and tests."""
        (N, K), device = shape, generator.device
        kind = BY_NAME[spec.type.upper()]
        size = (N * K // kind.length, kind.num_bytes)
        blocks_XB = torch.randint(
            0, 256, size, dtype=torch.uint8, device=device, generator=generator
        )
        for at, value in _FLOATS[spec.type]:
            number = torch.tensor([value * std], dtype=torch.float16).view(torch.uint8)
            blocks_XB[:, at : at + 2] = number.to(device)
        return cls(bytes_NX=blocks_XB.reshape(N, -1), spec=spec)

    @property
    def kind(self) -> BlockType:
        return BY_NAME[self.spec.type.upper()]

    @property
    def out_features(self) -> int:
        return self.bytes_NX.shape[0]

    @property
    def in_features(self) -> int:
        start, stop = self.input_range
        return stop - start

    @property
    def input_range(self) -> tuple[int, int]:
        """Return (start, stop) of the weight's inputs within the stored blocks."""
        return self.inputs or (0, self.bytes_NX.shape[1] // self.kind.num_bytes * self.kind.length)

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
            raise weight_error(
                name, f"expected bytes [N, row], found {bytes_NX.dtype} {list(bytes_NX.shape)}"
            )
        if bytes_NX.shape[1] % self.kind.num_bytes:
            raise weight_error(
                name, f"its rows of {bytes_NX.shape[1]} bytes are no whole blocks of {self.scheme}"
            )
        blocks_XB = bytes_NX.reshape(-1, self.kind.num_bytes)
        for at, _ in _FLOATS[self.spec.type]:
            floats = blocks_XB[:, at : at + 2].contiguous().view(torch.float16)
            if not torch.isfinite(floats).all():
                raise CheckpointError(
                    name, "the scales of its blocks contain NaN or infinity", "download it again"
                )

    def codes_and_grid(self) -> tuple[torch.Tensor, KGrid]:
        """Return the codes, uint8, and the grid of all inputs of the stored blocks."""
        return read_blocks(self.bytes_NX, self.spec)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weights [N, K] in `dtype`, as gguf-py computes them in float32."""
        kind = self.kind
        in_features = self.bytes_NX.shape[1] // kind.num_bytes * kind.length
        rows = rows_at_once(in_features)
        parts = (decode_rows(part, kind, in_features) for part in self.bytes_NX.split(rows))
        return torch.cat([part.to(dtype) for part in parts])[:, slice(*self.input_range)]

    def to(self, device: torch.device | str) -> "KWeight":
        return replace(self, bytes_NX=self.bytes_NX.to(device))

    def take_inputs(self, start: int, stop: int, name: str = "weight") -> "KWeight":
        """Return the weight of inputs `start` to `stop` - 1. Raises CheckpointError."""
        if start % MIN_INPUTS or stop % MIN_INPUTS:
            raise CheckpointError(
                name,
                f"its inputs {start} to {stop - 1} do not begin and end at multiples of"
                f" {MIN_INPUTS}",
                "use fewer GPUs",
            )
        length, num_bytes = self.kind.length, self.kind.num_bytes
        start, stop = (self.input_range[0] + each for each in (start, stop))
        first, last = start // length, -(-stop // length)
        bytes_NX = self.bytes_NX[:, first * num_bytes : last * num_bytes].contiguous()
        inputs = (start - first * length, stop - first * length)
        whole = inputs == (0, (last - first) * length)
        return replace(self, bytes_NX=bytes_NX, inputs=None if whole else inputs)

    @staticmethod
    def merge(parts: "list[KWeight]", name: str = "weight") -> "KWeight":
        """Stack outputs. Raises CheckpointError if the parts are of different types."""
        first = parts[0]
        for part in parts[1:]:
            if not isinstance(part, KWeight) or (part.spec, part.input_range) != (
                first.spec,
                first.input_range,
            ):
                raise CheckpointError(
                    name,
                    f"linears merged into it differ: {first.scheme} against {part.scheme}",
                    ONE_SCHEME,
                )
        return replace(first, bytes_NX=torch.cat([part.bytes_NX for part in parts]))


def is_k_quant(spec: QuantSpec) -> bool:
    """Return True if a spec's weights are blocks of K_TYPES, whose codes solvers choose."""
    return spec.type in K_TYPES


def is_in_blocks(spec: QuantSpec) -> bool:
    """Return True if a spec's weights are blocks of BLOCK_TYPES."""
    return spec.type in BLOCK_TYPES
