"""The in-memory form of a weight in 4-bit floating point: MXFP4 and NVFP4. Knows no file format.

A number is a sign, two bits of exponent and one of mantissa (e2m1): 0, 0.5, 1, 1.5, 2, 3, 4 or 6.
MXFP4 shares a power of two among 32 inputs, NVFP4 a float8 number among 16 and one float32 number
for the whole tensor. Twice such a number is whole, so `as_codes` is exact: symmetric 8-bit codes,
for which there are kernels. Legend: N outputs, K inputs, G groups, B bytes of a row.
"""

from dataclasses import dataclass, replace

import torch

from formats.errors import CheckpointError
from formats.packed import PackedWeight
from formats.scheme import FP4_TYPES, ActivationSpec, QuantSpec, Scheme

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST = MAGNITUDES[-1]
FP8_SCALE = torch.float8_e4m3fn
FP8_LARGEST = 448.0
EXPONENT_BIAS = 127  # a byte e of MXFP4's scales is 2^(e - 127)
SCALE_DTYPES = {"mxfp4": torch.uint8, "nvfp4": FP8_SCALE}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fp4Weight:
    """A weight [N, K]: W[n, k] = scale[n, g] * number[n, k], g = k // group size."""

    bytes_NB: torch.Tensor  # uint8 [N, K / 2]: the number of an even input in the low four bits
    scales_NG: torch.Tensor  # MXFP4: uint8 exponents; NVFP4: float8_e4m3fn
    global_scale: torch.Tensor | None  # NVFP4: float32 [], by which scales are divided
    spec: QuantSpec
    activation: ActivationSpec | None = None
    input_scale: torch.Tensor | None = None

    @classmethod
    def from_float(
        cls, weight_NK: torch.Tensor, spec: QuantSpec, name: str = "weight"
    ) -> "Fp4Weight":
        """Round to nearest. Raises CheckpointError, with `name`, on NaN or infinity."""
        weight_NK = weight_NK.float()
        if not torch.isfinite(weight_NK).all():
            raise CheckpointError(name, "its weights contain NaN or infinity", "mend the model")
        spec.check_shape(name, *weight_NK.shape)
        groups_NGL = weight_NK.unflatten(1, (spec.num_groups(weight_NK.shape[1]), -1))
        largest_NG = groups_NGL.abs().amax(-1)
        global_scale = None
        if spec.type == "mxfp4":
            # the smallest power of two with which nothing is clipped by more than half a step
            exponent_NG = (largest_NG / 7).clamp(min=2.0**-126).log2().ceil()
            exponent_NG = torch.where(largest_NG == 0, 0.0, exponent_NG)
            scales_NG = (exponent_NG + EXPONENT_BIAS).clamp(0, 254).to(torch.uint8)
        else:
            top = weight_NK.abs().amax().clamp(min=1e-30)
            global_scale = FP8_LARGEST * LARGEST / top
            wanted_NG = (largest_NG * global_scale / LARGEST).clamp(2.0**-9, FP8_LARGEST)
            scales_NG = wanted_NG.to(FP8_SCALE)
        found = cls(
            bytes_NB=torch.empty(0, dtype=torch.uint8),
            scales_NG=scales_NG,
            global_scale=global_scale,
            spec=spec,
        )
        places_NK = (groups_NGL / found.steps()[..., None]).flatten(1)
        packed = replace(found, bytes_NB=_to_bytes(places_NK))
        packed.check(name)
        return packed

    @property
    def out_features(self) -> int:
        return self.bytes_NB.shape[0]

    @property
    def in_features(self) -> int:
        return 2 * self.bytes_NB.shape[1]

    @property
    def input_order(self) -> None:
        """The formats have no order of inputs but the model's."""
        return None

    @property
    def scheme(self) -> Scheme:
        return Scheme(weight=self.spec, activation=self.activation)

    @property
    def device(self) -> torch.device:
        return self.bytes_NB.device

    def steps(self) -> torch.Tensor:
        """The scales as numbers, float32 [N, G]."""
        if self.spec.type == "mxfp4":
            return torch.exp2(self.scales_NG.float() - EXPONENT_BIAS)
        return self.scales_NG.float() / self.global_scale.float()

    def check(self, name: str = "weight") -> None:
        """Raise CheckpointError, with `name`, unless every invariant of the fields holds."""
        if self.bytes_NB.dtype != torch.uint8 or self.bytes_NB.ndim != 2:
            raise CheckpointError(
                name,
                f"expected uint8 [N, K / 2], found {self.bytes_NB.dtype}"
                f" {list(self.bytes_NB.shape)}",
            )
        self.spec.check_shape(name, self.out_features, self.in_features)
        shape = (self.out_features, self.spec.num_groups(self.in_features))
        dtype = SCALE_DTYPES[self.spec.type]
        if self.scales_NG.shape != shape or self.scales_NG.dtype != dtype:
            raise CheckpointError(
                f"{name} scales",
                f"expected {dtype} {list(shape)}, found {self.scales_NG.dtype}"
                f" {list(self.scales_NG.shape)}",
            )
        whole = self.global_scale
        if (whole is None) != (self.spec.type == "mxfp4"):
            raise CheckpointError(f"{name} global scale", "is there for NVFP4 and only for it")
        if whole is not None and not (whole.numel() == 1 and bool(whole > 0)):
            raise CheckpointError(f"{name} global scale", "expected one number above 0")
        steps_NG = self.steps()
        if not torch.isfinite(steps_NG).all():
            raise CheckpointError(f"{name} scales", "contain NaN or infinity")

    def numbers(self) -> torch.Tensor:
        """Twice each number, int8 [N, K]: -12 to 12."""
        return doubled(self.bytes_NB)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Weights [N, K] in `dtype`, computed in float32."""
        groups_NGL = self.numbers().float().mul_(0.5).unflatten(1, (self.scales_NG.shape[1], -1))
        return groups_NGL.mul_(self.steps()[..., None]).flatten(1).to(dtype)

    def as_codes(self) -> PackedWeight:
        """The same weights, bit for bit, as symmetric 8-bit codes with float32 scales.

        A group whose scale is 0 has codes of zero and scale 1.
        """
        spec = QuantSpec(bits=8, symmetric=True, group_size=self.spec.group_size)
        steps_NG = self.steps() / 2
        empty_NG = steps_NG == 0
        numbers_NGL = self.numbers().to(torch.int16).unflatten(1, (self.scales_NG.shape[1], -1))
        numbers_NGL = numbers_NGL.masked_fill(empty_NG[..., None], 0)
        codes_NK = numbers_NGL.flatten(1) + spec.symmetric_zero
        return PackedWeight.from_codes(codes_NK, steps_NG.masked_fill(empty_NG, 1), None, spec)

    def to(self, device: torch.device | str) -> "Fp4Weight":
        whole = self.global_scale
        return replace(
            self,
            bytes_NB=self.bytes_NB.to(device),
            scales_NG=self.scales_NG.to(device),
            global_scale=None if whole is None else whole.to(device),
        )


def doubled(bytes_NB: torch.Tensor) -> torch.Tensor:
    """Twice the numbers of bytes, the one in the low four bits first: int8 [N, 2 B]."""
    table = torch.tensor([int(2 * x) for x in MAGNITUDES], dtype=torch.int8)
    table = torch.cat([table, -table]).to(bytes_NB.device)
    return table[torch.stack([bytes_NB & 15, bytes_NB >> 4], -1).flatten(1).int()]


def _to_bytes(places_NK: torch.Tensor) -> torch.Tensor:
    """Float multiples of a scale to the nearest numbers, two in a byte; halves go to even codes."""
    table = torch.tensor(MAGNITUDES, device=places_NK.device)
    middles = (table[1:] + table[:-1]) / 2
    size_NK = places_NK.abs()
    codes_NK = torch.bucketize(size_NK, middles, right=False)
    # a number in the middle goes to the even code
    tied_NK = (size_NK[..., None] == middles).any(-1)
    codes_NK = torch.where(tied_NK & (codes_NK % 2 == 1), codes_NK + 1, codes_NK)
    codes_NK = codes_NK.to(torch.uint8) | ((places_NK < 0).to(torch.uint8) << 3)
    return codes_NK[:, 0::2] | (codes_NK[:, 1::2] << 4)


def is_fp4(spec: QuantSpec) -> bool:
    """Whether its numbers are 4-bit floating point."""
    return spec.type in FP4_TYPES
