"""In-memory form of a weight in float8 numbers.

`PackedWeight` is its counterpart for integer codes. Legend: N outputs, K inputs; R, C: rows and
columns of scales, each for a block of `spec.rows` outputs and `spec.group_size` inputs (-1: all).
The last block of a row or column may be smaller.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from formats.errors import ONE_SCHEME, QUANTIZE_AGAIN, CheckpointError, weight_error
from formats.in_memory.packed import SCALE_DTYPES
from formats.numerics.activation import check_input_scale, describe_scale, same_activation
from formats.numerics.affine import rows_at_once
from formats.numerics.finite import check_finite
from formats.numerics.microscaled import shared_exponents
from formats.scheme import ALL, FP8_MAX, MXFP8, ActivationSpec, QuantSpec, Scheme

FP8_DTYPE = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fp8Weight:
    """A weight [N, K]: W[n, k] = scales[n // rows, k // group_size] * codes[n, k]."""

    codes_NK: torch.Tensor  # float8_e4m3fn
    scales_RC: torch.Tensor  # floating point, finite, not zero
    spec: QuantSpec
    activation: ActivationSpec | None = None
    input_scale: torch.Tensor | None = None  # float32 [], scale of a static activation
    input_order: ClassVar[None] = None  # float8 formats never reorder inputs

    @classmethod
    def from_float(
        cls, weight_NK: torch.Tensor, spec: QuantSpec, name: str = "weight"
    ) -> "Fp8Weight":
        """Round to nearest; a block's scale is its largest magnitude divided by 448.

        MXFP8 scales are powers of two. Raises CheckpointError, with `name`, on NaN or infinity.
        """
        rows, columns = block_size(spec, *weight_NK.shape)
        step = rows_at_once(weight_NK.shape[1])
        if spec.rows != ALL:
            step = max(1, step // rows) * rows
        check_finite(name, weight_NK)
        largest = [_largest(block, rows, columns) for block in weight_NK.split(step)]
        largest_RC = torch.cat(largest)
        if spec.rows == ALL:
            largest_RC = largest_RC.amax(0, keepdim=True)
        # divide by a tensor, as activation.quantize_input does, for the same bits on every device
        scales_RC = largest_RC / torch.full_like(largest_RC, FP8_MAX)
        if spec == MXFP8:
            scales_RC = torch.exp2(shared_exponents(largest_RC, 8).float())
        scales_RC = torch.where(largest_RC == 0, 1.0, scales_RC)
        codes_NK = torch.empty(weight_NK.shape, dtype=FP8_DTYPE, device=weight_NK.device)
        for start in range(0, len(weight_NK), step):
            block = weight_NK[start : start + step]
            own_RC = scales_RC if spec.rows == ALL else scales_RC[start // rows :]
            scaled = block.float() / _spread(own_RC, rows, columns, block.shape)
            codes_NK[start : start + step] = scaled.clamp_(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)
        weight = cls(codes_NK=codes_NK, scales_RC=scales_RC, spec=spec)
        weight.check(name)
        return weight

    @property
    def out_features(self) -> int:
        return self.codes_NK.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes_NK.shape[1]

    @property
    def scheme(self) -> Scheme:
        return Scheme(weight=self.spec, activation=self.activation)

    @property
    def device(self) -> torch.device:
        return self.codes_NK.device

    def check(self, name: str = "weight") -> None:
        """Raise CheckpointError, with `name`, unless every invariant of the fields holds."""
        if self.codes_NK.dtype != FP8_DTYPE or self.codes_NK.ndim != 2 or not self.codes_NK.numel():
            raise weight_error(
                name,
                f"expected float8_e4m3fn [N, K], found {self.codes_NK.dtype}"
                f" {list(self.codes_NK.shape)}",
            )
        shape = scales_shape(self.spec, *self.codes_NK.shape)
        if self.scales_RC.shape != shape or self.scales_RC.dtype not in SCALE_DTYPES:
            raise weight_error(
                f"{name} scales",
                f"expected floating point {list(shape)},"
                f" found {self.scales_RC.dtype} {list(self.scales_RC.shape)}",
            )
        if not torch.isfinite(self.scales_RC).all() or (self.scales_RC == 0).any():
            raise CheckpointError(f"{name} scales", "contain NaN, infinity or zero", QUANTIZE_AGAIN)
        # 0x7F and 0xFF are the two NaN of this type; it has no infinity
        if ((self.codes_NK.view(torch.uint8) & 0x7F) == 0x7F).any():
            raise CheckpointError(name, "its weights contain NaN", "quantize again")
        check_input_scale(self.activation, self.input_scale, name)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weights [N, K] in `dtype`, computed in float32."""
        rows, columns = block_size(self.spec, *self.codes_NK.shape)
        scales_NK = _spread(self.scales_RC.float(), rows, columns, self.codes_NK.shape)
        return (self.codes_NK.float() * scales_NK).to(dtype)

    def to(self, device: torch.device | str) -> "Fp8Weight":
        scale = self.input_scale
        return replace(
            self,
            codes_NK=self.codes_NK.to(device),
            scales_RC=self.scales_RC.to(device),
            input_scale=None if scale is None else scale.to(device),
        )

    @staticmethod
    def merge(parts: "list[Fp8Weight]", name: str = "weight") -> "Fp8Weight":
        """Stack outputs. Raises CheckpointError if the parts' numerics or input scales differ.

        If a part ends inside a block or has a single scale, the result has a scale per row.
        """
        first = parts[0]
        for part in parts[1:]:
            if (part.spec, part.in_features) != (first.spec, first.in_features):
                raise CheckpointError(
                    name,
                    f"linears merged into it differ: {first.spec} against {part.spec}",
                    ONE_SCHEME,
                )
            if not same_activation(first, part):
                raise CheckpointError(
                    name,
                    f"linears merged into it differ: inputs {describe_scale(first)} against"
                    f" {describe_scale(part)}",
                    ONE_SCHEME,
                )
        rows = first.spec.rows
        if rows == ALL or any(part.out_features % rows for part in parts[:-1]):
            parts = [part.with_scales_of_rows() for part in parts]
        return replace(
            parts[0],
            codes_NK=torch.cat([p.codes_NK.view(torch.uint8) for p in parts]).view(FP8_DTYPE),
            scales_RC=torch.cat([part.scales_RC for part in parts]),
        )

    def with_scales_of_rows(self) -> "Fp8Weight":
        """Return the same weight with one scale per output."""
        rows, _ = block_size(self.spec, *self.codes_NK.shape)
        scales_NC = self.scales_RC.repeat_interleave(rows, 0)[: self.out_features]
        return replace(self, scales_RC=scales_NC, spec=replace(self.spec, rows=1))


def block_size(spec: QuantSpec, out_features: int, in_features: int) -> tuple[int, int]:
    """Return (outputs, inputs) of a block that shares a scale."""
    rows = out_features if spec.rows == ALL else spec.rows
    return rows, spec.group_length(in_features)


def scales_shape(spec: QuantSpec, out_features: int, in_features: int) -> tuple[int, int]:
    """Return rows and columns of the scales of a weight [N, K]."""
    rows, columns = block_size(spec, out_features, in_features)
    return -(-out_features // max(rows, 1)), -(-in_features // max(columns, 1))


def _largest(block_NK: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return the largest magnitude in each block [R, C]."""
    return _tiles(block_NK.float(), min(rows, len(block_NK)), columns).abs().amax((1, 3))


def _tiles(weight_NK: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return blocks [R, rows, C, columns], padded with zeros."""
    (N, K) = weight_NK.shape
    padded = torch.nn.functional.pad(weight_NK, (0, -K % columns, 0, -N % rows))
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


def _spread(
    scales_RC: torch.Tensor, rows: int, columns: int, shape: torch.Size | tuple[int, int]
) -> torch.Tensor:
    """Expand scales to every weight [N, K]."""
    wide = scales_RC if scales_RC.shape[1] == 1 else scales_RC.repeat_interleave(columns, 1)
    tall = wide if wide.shape[0] == 1 else wide.repeat_interleave(rows, 0)
    return tall[: shape[0], : shape[1]]
