"""In-memory form of a weight in 4-bit floating point: MXFP4 and NVFP4.

A number is a sign, two bits of exponent and one of mantissa (e2m1): 0, 0.5, 1, 1.5, 2, 3, 4 or 6.
MXFP4 has a power-of-two scale for 32 inputs. NVFP4 has a float8 scale for 16 inputs and one float32
scale for the tensor. Twice a number is an integer, so `as_codes` converts exactly to symmetric
8-bit codes, for products with 8-bit inputs. Legend: N outputs, K inputs, G groups, B bytes of a
row.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from formats.errors import ONE_SCHEME, QUANTIZE_AGAIN, CheckpointError, weight_error
from formats.in_memory.packed import PackedWeight
from formats.numerics.activation import same_activation
from formats.numerics.affine import rows_at_once
from formats.numerics.finite import check_finite
from formats.scheme import FP4_TYPES, ActivationSpec, QuantSpec, Scheme

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST = MAGNITUDES[-1]
# Scales that the search tries, relative to the first choice, which clips (almost) nothing. MXFP4
# scales are powers of two. NVFP4 also tries larger scales, because numbers above 4 are far apart.
SEARCHED = {
    "mxfp4": (1.0, 0.5, 2.0),
    "nvfp4": (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 1.1, 1.2, 1.3, 1.4, 1.5),
}
FP8_SCALE = torch.float8_e4m3fn
FP8_LARGEST = 448.0
EXPONENT_BIAS = 127  # a byte e of MXFP4's scales is 2^(e - 127)
SCALE_DTYPES = {"mxfp4": torch.uint8, "nvfp4": FP8_SCALE}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fp4Weight:
    """A weight [N, K]: W[n, k] = scale[n, g] * number[n, k], g = k // group size."""

    bytes_NB: torch.Tensor  # uint8 [N, K / 2]: the number of an even input in the low four bits
    scales_NG: torch.Tensor  # MXFP4: uint8 exponents; NVFP4: float8_e4m3fn
    # NVFP4: a divisor of the scales, float32 []; in merged weights [N, 1]
    global_scale: torch.Tensor | None
    spec: QuantSpec
    activation: ActivationSpec | None = None
    input_scale: torch.Tensor | None = None
    # NVFP4 from NVIDIA's tools: a factor of the scales, float32 [] or [N, 1]
    global_factor: torch.Tensor | None = None
    input_order: ClassVar[None] = None  # these formats never reorder inputs

    @classmethod
    def from_float(
        cls,
        weight_NK: torch.Tensor,
        spec: QuantSpec,
        name: str = "weight",
        importance_K: torch.Tensor | None = None,
    ) -> "Fp4Weight":
        """Round to nearest, with the scales of least squared error.

        `importance_K` weights the errors of inputs; None: all equal. Raises CheckpointError, with
        `name`, on NaN or infinity.
        """
        grid = cls.grid(weight_NK, spec, name, importance_K)
        blocks = weight_NK.split(rows_at_once(weight_NK.shape[1]))
        steps = grid.steps().split(len(blocks[0]))
        codes = [
            nearest_codes((_groups(block, spec) / step_NG[..., None]).flatten(1))
            for block, step_NG in zip(blocks, steps, strict=True)
        ]
        return grid.with_codes(torch.cat(codes), name)

    @classmethod
    def grid(
        cls,
        weight_NK: torch.Tensor,
        spec: QuantSpec,
        name: str = "weight",
        importance_K: torch.Tensor | None = None,
    ) -> "Fp4Weight":
        """Return the scales of a weight without its numbers; see `from_float` and `with_codes`."""
        spec.check_shape(name, *weight_NK.shape)
        blocks = weight_NK.split(rows_at_once(weight_NK.shape[1]))
        check_finite(name, weight_NK)
        importance_GL = None
        if importance_K is not None:
            importance_GL = importance_K.float().view(spec.num_groups(weight_NK.shape[1]), -1)
        largest_NG = torch.cat([_groups(block, spec).abs().amax(-1) for block in blocks])
        global_scale = None
        if spec.type == "nvfp4":
            global_scale = FP8_LARGEST * LARGEST / largest_NG.amax().clamp(min=1e-30)
        scales = [
            _search(_groups(block, spec), largest_BG, spec, global_scale, importance_GL)
            for block, largest_BG in zip(blocks, largest_NG.split(len(blocks[0])), strict=True)
        ]
        return cls(
            bytes_NB=torch.empty(0, dtype=torch.uint8),
            scales_NG=torch.cat([each.view(torch.uint8) for each in scales]).view(scales[0].dtype),
            global_scale=global_scale,
            spec=spec,
        )

    def with_codes(self, codes_NK: torch.Tensor, name: str = "weight") -> "Fp4Weight":
        """Return this grid with codes 0 to 15, whose bit 3 is the sign. Raises CheckpointError."""
        codes_NK = codes_NK.to(torch.uint8)
        found = replace(self, bytes_NB=codes_NK[:, 0::2] | (codes_NK[:, 1::2] << 4))
        found.check(name)
        return found

    @property
    def out_features(self) -> int:
        return self.bytes_NB.shape[0]

    @property
    def in_features(self) -> int:
        return 2 * self.bytes_NB.shape[1]

    @property
    def scheme(self) -> Scheme:
        return Scheme(weight=self.spec, activation=self.activation)

    @property
    def device(self) -> torch.device:
        return self.bytes_NB.device

    def steps(self) -> torch.Tensor:
        """Return the scales as float32 [N, G]."""
        if self.spec.type == "mxfp4":
            return torch.exp2(self.scales_NG.float() - EXPONENT_BIAS)
        if self.global_factor is not None:
            return self.scales_NG.float() * self.global_factor.float()
        return self.scales_NG.float() / self.global_scale.float()

    def check(self, name: str = "weight") -> None:
        """Raise CheckpointError, with `name`, unless every invariant of the fields holds."""
        if self.bytes_NB.dtype != torch.uint8 or self.bytes_NB.ndim != 2:
            raise weight_error(
                name,
                f"expected uint8 [N, K / 2], found {self.bytes_NB.dtype}"
                f" {list(self.bytes_NB.shape)}",
            )
        self.spec.check_shape(name, self.out_features, self.in_features)
        shape = (self.out_features, self.spec.num_groups(self.in_features))
        dtype = SCALE_DTYPES[self.spec.type]
        if self.scales_NG.shape != shape or self.scales_NG.dtype != dtype:
            raise weight_error(
                f"{name} scales",
                f"expected {dtype} {list(shape)}, found {self.scales_NG.dtype}"
                f" {list(self.scales_NG.shape)}",
            )
        whole = self.global_scale if self.global_factor is None else self.global_factor
        if (whole is None) != (self.spec.type == "mxfp4"):
            expected, found = ("none", "one") if self.spec.type == "mxfp4" else ("one", "none")
            raise CheckpointError(
                f"{name} global scale",
                f"expected {expected} for {self.spec.type}, found {found}",
                "copy the tensors and the quantization block from the original checkpoint",
            )
        if self.spec.type == "mxfp4" and (self.scales_NG == 255).any():
            raise CheckpointError(f"{name} scales", "contain NaN", QUANTIZE_AGAIN)
        is_one = whole is None or whole.numel() == 1 or whole.shape == (self.out_features, 1)
        if whole is not None and not (is_one and bool((whole > 0).all())):
            raise weight_error(
                f"{name} global scale",
                f"expected one number above 0, found {whole.flatten()[:4].tolist()}",
            )
        steps_NG = self.steps()
        if not torch.isfinite(steps_NG).all():
            raise CheckpointError(f"{name} scales", "contain NaN or infinity", QUANTIZE_AGAIN)

    def with_divisor(self, name: str = "weight") -> "Fp4Weight":
        """Return the same weight with a dividing global scale, as compressed-tensors stores it.

        Raises CheckpointError if no float32 divisor gives the same products.
        """
        if self.global_factor is None:
            return self
        steps_NG = self.steps()
        nearest = (1 / self.global_factor.double()).float()
        tried = nearest.view(torch.int32) + torch.arange(-2, 3, device=nearest.device).int()
        for divisor in tried.view(torch.float32):
            found = replace(self, global_scale=divisor, global_factor=None)
            if torch.equal(found.steps(), steps_NG):
                return found
        raise CheckpointError(
            name,
            "its global scale is a multiplier, and no float32 number divides to the same"
            " weights: they would change by up to one part in 2^23",
            "serve the folder as it is, or quantize the float model",
        )

    def numbers(self) -> torch.Tensor:
        """Return twice each number, int8 [N, K]: -12 to 12."""
        return doubled(self.bytes_NB)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weights [N, K] in `dtype`, computed in float32."""
        groups_NGL = self.numbers().float().mul_(0.5).unflatten(1, (self.scales_NG.shape[1], -1))
        return groups_NGL.mul_(self.steps()[..., None]).flatten(1).to(dtype)

    def as_codes(self) -> PackedWeight:
        """Return the same weights, bit for bit, as symmetric 8-bit codes with float32 scales.

        A group whose scale is 0 has codes of zero and scale 1.
        """
        spec = QuantSpec(bits=8, symmetric=True, group_size=self.spec.group_size)
        steps_NG = self.steps() / 2
        empty_NG = steps_NG == 0
        steps_NG = steps_NG.masked_fill(empty_NG, 1)
        parts, rows = [], rows_at_once(self.in_features)
        for start in range(0, self.out_features, rows):
            own = slice(start, start + rows)
            numbers_NK = doubled(self.bytes_NB[own]).to(torch.int16)
            numbers_NGL = numbers_NK.unflatten(1, (steps_NG.shape[1], -1))
            numbers_NGL = numbers_NGL.masked_fill(empty_NG[own, :, None], 0)
            codes_NK = numbers_NGL.flatten(1) + spec.symmetric_zero
            parts.append(PackedWeight.from_codes(codes_NK, steps_NG[own], None, spec))
        return PackedWeight.merge(parts)

    @staticmethod
    def merge(parts: "list[Fp4Weight]", name: str = "weight") -> "Fp4Weight":
        """Stack outputs; each keeps its own global scale. Raises CheckpointError."""
        first = parts[0]
        for part in parts[1:]:
            if not isinstance(part, Fp4Weight) or not (
                (part.spec, part.in_features) == (first.spec, first.in_features)
                and (part.global_factor is None) == (first.global_factor is None)
                and same_activation(part, first)
            ):
                raise CheckpointError(
                    name,
                    f"linears merged into it differ: {first.scheme} against {part.scheme}",
                    ONE_SCHEME,
                )
        whole = {
            field: _whole_of_rows([getattr(part, field) for part in parts], parts)
            for field in ("global_scale", "global_factor")
            if getattr(first, field) is not None
        }
        return replace(
            first,
            bytes_NB=torch.cat([part.bytes_NB for part in parts]),
            scales_NG=torch.cat([part.scales_NG.view(torch.uint8) for part in parts]).view(
                first.scales_NG.dtype
            ),
            **whole,
        )

    def take_inputs(self, start: int, stop: int, name: str = "weight") -> "Fp4Weight":
        """Return the weight of inputs `start` to `stop` - 1. Raises CheckpointError."""
        length = self.spec.group_size
        if start % length or stop % length:
            raise CheckpointError(
                name,
                f"its inputs {start} to {stop - 1} do not begin and end at multiples of {length}",
                "use fewer GPUs",
            )
        return replace(
            self,
            bytes_NB=self.bytes_NB[:, start // 2 : stop // 2].contiguous(),
            scales_NG=self.scales_NG[:, start // length : stop // length].contiguous(),
        )

    def to(self, device: torch.device | str) -> "Fp4Weight":
        whole = {
            field: value.to(device)
            for field in ("global_scale", "global_factor")
            if (value := getattr(self, field)) is not None
        }
        return replace(
            self, bytes_NB=self.bytes_NB.to(device), scales_NG=self.scales_NG.to(device), **whole
        )


def _whole_of_rows(values: list[torch.Tensor], parts: list[Fp4Weight]) -> torch.Tensor:
    """Return the global scale of merged parts: one number if all are equal, else [N, 1]."""
    first = values[0]
    if first.numel() == 1 and all(torch.equal(value, first) for value in values[1:]):
        return first
    rows = zip(values, parts, strict=True)
    return torch.cat([value.reshape(-1, 1).expand(part.out_features, 1) for value, part in rows])


def _groups(weight_NK: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """Return float32 groups [N, G, L]."""
    return weight_NK.float().unflatten(1, (spec.num_groups(weight_NK.shape[1]), -1))


def doubled(bytes_NB: torch.Tensor) -> torch.Tensor:
    """Unpack bytes to twice their numbers, low four bits first: int8 [N, 2 B]."""
    numbers = [int(2 * x) for x in MAGNITUDES]
    numbers += [-number for number in numbers]
    table = torch.tensor(numbers, dtype=torch.int8, device=bytes_NB.device)
    return table[torch.stack([bytes_NB & 15, bytes_NB >> 4], -1).flatten(1).int()]


def nearest_codes(places_NK: torch.Tensor) -> torch.Tensor:
    """Return codes, uint8, of the numbers nearest to multiples of a scale; ties go to even codes.

    Bit 3 is the sign.
    """
    return codes_of(nearest_numbers(places_NK)) | ((places_NK < 0).to(torch.uint8) << 3)


def nearest_numbers(places: torch.Tensor) -> torch.Tensor:
    """Return the nearest numbers of the format; ties go to even codes."""
    size = places.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0).to(size.dtype))
    return (size / step).round_().mul_(step).clamp_(max=LARGEST).copysign(places)


def codes_of(numbers: torch.Tensor) -> torch.Tensor:
    """Return codes, uint8, of the magnitudes of numbers of the format, without their signs."""
    table = torch.tensor(MAGNITUDES, device=numbers.device)
    return torch.bucketize(numbers.abs().float(), table).to(torch.uint8)


def _search(
    groups_NGL: torch.Tensor,
    largest_NG: torch.Tensor,
    spec: QuantSpec,
    global_scale: torch.Tensor | None,
    importance_GL: torch.Tensor | None,
) -> torch.Tensor:
    """Return the stored scales [N, G] of least squared error; ties go to the first tried."""
    best_NG, min_NG = None, None
    for factor in SEARCHED[spec.type]:
        if global_scale is None:
            # start with the smallest power of two that clips nothing by more than half a step
            exponent_NG = (largest_NG / 7).clamp(min=2.0**-126).log2().ceil()
            exponent_NG = torch.where(largest_NG == 0, 0.0, exponent_NG + math.log2(factor))
            scales_NG = (exponent_NG + EXPONENT_BIAS).clamp(0, 254).to(torch.uint8)
            steps_NG = torch.exp2(scales_NG.float() - EXPONENT_BIAS)
        else:
            wanted_NG = (largest_NG * global_scale * (factor / LARGEST)).clamp(2.0**-9, FP8_LARGEST)
            scales_NG = wanted_NG.to(FP8_SCALE)
            steps_NG = scales_NG.float() / global_scale
        error_NGL = nearest_numbers(groups_NGL / steps_NG[..., None]).mul_(steps_NG[..., None])
        error_NGL = error_NGL.sub_(groups_NGL).square_()
        if importance_GL is not None:
            error_NGL.mul_(importance_GL)
        error_NG = error_NGL.sum(-1)
        if best_NG is None:
            best_NG, min_NG = scales_NG, error_NG
            continue
        better_NG = error_NG < min_NG
        min_NG = torch.where(better_NG, error_NG, min_NG)
        chosen_NG = torch.where(better_NG, scales_NG.view(torch.uint8), best_NG.view(torch.uint8))
        best_NG = chosen_NG.view(scales_NG.dtype)
    return best_NG


def is_fp4(spec: QuantSpec) -> bool:
    """Return True if a spec's numbers are 4-bit floating point."""
    return spec.type in FP4_TYPES
