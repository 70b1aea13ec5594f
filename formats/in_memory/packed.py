"""The only in-memory form of a weight in integer codes.

Every integer format on disk is decoded into it and encoded from it. Zero points are the true ones,
always present, and constant if symmetric. `Fp8Weight` is its counterpart for float8 numbers.
Legend: N outputs, K inputs, G groups, W words of a row.
"""

from dataclasses import dataclass, replace

import torch

from formats.errors import ONE_SCHEME, QUANTIZE_AGAIN, CheckpointError, RangeError, weight_error
from formats.numerics import affine
from formats.numerics.activation import check_input_scale, describe_scale, same_activation
from formats.numerics.bits import pack, packed_length, unpack
from formats.scheme import ActivationSpec, QuantSpec, Scheme

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedWeight:
    """Weight [N, K]: W[n, k] = scales[n, g] * (code[n, k] - zeros[n, g]), g = k // (K / G).

    With an `input_order`, columns are sorted: column j belongs to input input_order[j], so that the
    inputs of a group are adjacent.
    """

    words_NW: (
        torch.Tensor
    )  # int32 [N, K * bits / 32], each row packed along K (formats/numerics/bits.py)
    scales_NG: torch.Tensor  # floating point [N, G], finite, never zero, may be negative
    zeros_NG: torch.Tensor  # uint8 [N, G], in code units
    spec: QuantSpec
    in_features: int
    input_order: torch.Tensor | None = None  # int64 [K], a permutation; None: the identity
    activation: ActivationSpec | None = None  # rounding of the linear's input; None: not rounded
    input_scale: torch.Tensor | None = None  # float32 [], scale of a static activation

    @classmethod
    def from_codes(
        cls,
        codes_NK: torch.Tensor,
        scales_NG: torch.Tensor,
        zeros_NG: torch.Tensor | None,
        spec: QuantSpec,
        name: str = "weight",
    ) -> "PackedWeight":
        """Pack a solver's integer codes [N, K] unchanged. `zeros_NG` None means symmetric.

        Raises CheckpointError, with `name`, on wrong shapes, codes or zeros out of range, or bad
        scales.
        """
        given = {"codes": codes_NK, "scales": scales_NG}
        if zeros_NG is not None:
            given["zeros"] = zeros_NG
        for field, tensor in given.items():
            if not isinstance(tensor, torch.Tensor):
                raise CheckpointError(
                    f"{name} {field}",
                    f"expected a tensor, found {type(tensor).__name__}",
                    "torch.as_tensor converts arrays and lists",
                )
            if tensor.is_meta:
                raise CheckpointError(
                    f"{name} {field}",
                    "is on the meta device, without numbers",
                    "load the model's weights first",
                )
            if tensor.layout is not torch.strided:
                raise CheckpointError(
                    f"{name} {field}", f"has the layout {tensor.layout}", "call .to_dense()"
                )
        devices = {field: str(tensor.device) for field, tensor in given.items()}
        if len(set(devices.values())) > 1:
            found = ", ".join(f"{field} on {device}" for field, device in devices.items())
            raise CheckpointError(name, f"found {found}", "move all to one device")
        if spec.type != "int":
            raise _no_codes(name, spec)
        is_integer = not (codes_NK.is_floating_point() or codes_NK.is_complex())
        if codes_NK.ndim != 2 or not is_integer or codes_NK.dtype == torch.bool:
            raise CheckpointError(
                name,
                f"expected integer codes [N, K], found {codes_NK.dtype} {list(codes_NK.shape)}",
                "convert rounded codes with .to(torch.uint8); `from_float` rounds float weights",
            )
        codes_NK, scales_NG = _comparable(codes_NK), scales_NG.detach()
        if codes_NK.numel() and (codes_NK.min() < 0 or codes_NK.max() > spec.max_code):
            raise CheckpointError(
                name,
                f"expected codes in 0..{spec.max_code}, found {int(codes_NK.min())}"
                f"..{int(codes_NK.max())}",
                "signed codes need the zero point added first",
            )
        if zeros_NG is None:
            if not spec.symmetric:
                raise CheckpointError(
                    name,
                    "an asymmetric scheme needs zero points",
                    "give zeros [N, G], or use a symmetric scheme",
                )
            zeros_NG = torch.full_like(scales_NG, spec.symmetric_zero, dtype=torch.uint8)
        else:
            zeros_NG = _comparable(zeros_NG)
        is_right = (zeros_NG >= 0) & (zeros_NG <= spec.max_code) & (zeros_NG % 1 == 0)
        if not is_right.all():
            wrong = zeros_NG[~is_right][0].item()
            raise CheckpointError(
                name,
                f"expected whole zero points in 0..{spec.max_code}, found {wrong:g}",
                "round them, and add the middle code to signed ones",
            )
        packed = cls(
            words_NW=pack(codes_NK, spec.bits),
            scales_NG=scales_NG.contiguous(),
            zeros_NG=zeros_NG.to(torch.uint8).contiguous(),
            spec=spec,
            in_features=codes_NK.shape[1],
        )
        packed.check(name)
        return packed

    @classmethod
    def from_float(
        cls, weight_NK: torch.Tensor, spec: QuantSpec, name: str = "weight"
    ) -> "PackedWeight":
        """Round to nearest with the scales of affine.choose_scales, a block of rows at a time."""
        whole = (weight_NK, *affine.choose_scales(weight_NK, spec, name))
        rows = affine.rows_at_once(weight_NK.shape[1], weight_NK.device)
        parts = [
            cls.from_codes(affine.quantize(block, scales, zeros, spec), scales, zeros, spec, name)
            for block, scales, zeros in zip(*(each.split(rows) for each in whole), strict=True)
        ]
        return parts[0] if len(parts) == 1 else cls.merge(parts, name)

    @property
    def out_features(self) -> int:
        return self.words_NW.shape[0]

    @property
    def num_groups(self) -> int:
        return self.spec.num_groups(self.in_features)

    @property
    def scheme(self) -> Scheme:
        return Scheme(weight=self.spec, activation=self.activation)

    @property
    def device(self) -> torch.device:
        return self.words_NW.device

    def check(self, name: str = "weight") -> None:
        """Raise CheckpointError, with `name`, unless every invariant of the fields holds."""
        if self.spec.type != "int":
            raise _no_codes(name, self.spec)
        self.spec.check_shape(name, self.out_features, self.in_features)
        expected = {
            "words": (self.words_NW, torch.int32, packed_length(self.in_features, self.spec.bits)),
            "scales": (self.scales_NG, None, self.num_groups),
            "zeros": (self.zeros_NG, torch.uint8, self.num_groups),
        }
        for field, (tensor, dtype, width) in expected.items():
            if tensor.shape != (self.out_features, width) or dtype not in (None, tensor.dtype):
                raise weight_error(
                    f"{name} {field}",
                    f"expected {dtype or 'floating point'} [{self.out_features}, {width}],"
                    f" found {tensor.dtype} {list(tensor.shape)}",
                )
        if self.scales_NG.dtype not in SCALE_DTYPES:
            raise weight_error(f"{name} scales", f"not floating point: {self.scales_NG.dtype}")
        is_zero = self.scales_NG == 0
        if is_zero.any():
            raise CheckpointError(
                f"{name} scales",
                f"{int(is_zero.sum())} of {is_zero.numel()} are zero",
                f"{QUANTIZE_AGAIN}; your own codes: give groups of zero weights another scale, such"
                " as 1, and codes equal to their zero point",
            )
        if not torch.isfinite(self.scales_NG).all():
            raise CheckpointError(f"{name} scales", "contain NaN or infinity", QUANTIZE_AGAIN)
        if self.spec.symmetric and (self.zeros_NG != self.spec.symmetric_zero).any():
            raise CheckpointError(
                f"{name} zeros",
                f"a symmetric scheme has {self.spec.symmetric_zero} throughout,"
                f" found {self.zeros_NG.unique().tolist()[:8]}",
                "use an asymmetric scheme, such as w4a16-asym",
            )
        check_input_scale(self.activation, self.input_scale, name)

    def check_range(self, name: str = "weight") -> None:
        """Raise RangeError if a scale becomes infinity or zero in float16, in which files store it.

        Scales in a wider dtype are kept; most servers round them to float16 when loading.
        """
        stored_NG = self.scales_NG.to(affine.SCALE_DTYPE)
        lost_NG = torch.isinf(stored_NG) | (stored_NG == 0)
        if lost_NG.any():
            worst = float(self.scales_NG[lost_NG][0])
            raise RangeError(
                name,
                f"{int(lost_NG.sum())} of its {lost_NG.numel()} scales are beyond float16, in which"
                f" files and servers store them, such as {worst:.3g}",
                affine.OUT_OF_RANGE,
            )

    def codes(self) -> torch.Tensor:
        """Return uint8 codes [N, K], columns in `input_order`."""
        return unpack(self.words_NW, self.spec.bits)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weights [N, K] in `dtype`, computed in float32.

        Columns are in the model's order.
        """
        weight_NK = affine.dequantize(self.codes(), self.scales_NG, self.zeros_NG).to(dtype)
        if self.input_order is None:
            return weight_NK
        return torch.empty_like(weight_NK).index_copy_(1, self.input_order, weight_NK)

    def with_bits(self, bits: int) -> "PackedWeight":
        """Return an equal weight with wider codes: codes and zeros move to the new middle."""
        spec = replace(self.spec, bits=bits)
        if spec == self.spec:
            return self
        shift = spec.symmetric_zero - self.spec.symmetric_zero
        return replace(
            self,
            words_NW=pack(self.codes() + shift, bits),
            zeros_NG=self.zeros_NG + shift,
            spec=spec,
        )

    def to(self, device: torch.device | str) -> "PackedWeight":
        moved = {
            field: None if tensor is None else tensor.to(device)
            for field, tensor in (
                ("words_NW", self.words_NW),
                ("scales_NG", self.scales_NG),
                ("zeros_NG", self.zeros_NG),
                ("input_order", self.input_order),
                ("input_scale", self.input_scale),
            )
        }
        return replace(self, **moved)

    @staticmethod
    def merge(parts: "list[PackedWeight]", name: str = "weight") -> "PackedWeight":
        """Stack outputs: for example, q, k and v become one matrix.

        Raises CheckpointError if their numerics differ.
        """
        first = parts[0]
        for part in parts[1:]:
            if (part.spec, part.in_features) != (first.spec, first.in_features):
                raise CheckpointError(
                    name,
                    f"linears merged into it differ: {first.spec} with {first.in_features} inputs"
                    f" against {part.spec} with {part.in_features}",
                    ONE_SCHEME,
                )
            if not same_activation(first, part):
                raise CheckpointError(
                    name,
                    f"linears merged into it differ: inputs {describe_scale(first)} against"
                    f" {describe_scale(part)}",
                    ONE_SCHEME,
                )
            if not _same_order(first.input_order, part.input_order):
                raise CheckpointError(
                    name,
                    "linears merged into it have different input orders",
                    "quantize the model without act-order",
                )
        return replace(
            first,
            words_NW=torch.cat([part.words_NW for part in parts]),
            scales_NG=torch.cat([part.scales_NG for part in parts]),
            zeros_NG=torch.cat([part.zeros_NG for part in parts]),
        )


def _no_codes(name: str, spec: QuantSpec) -> CheckpointError:
    kind = "float8" if spec.type == "float" else spec.type
    return CheckpointError(
        name, f"{kind} weights have no integer codes", "give an integer scheme, such as w4a16-sym"
    )


def _comparable(values: torch.Tensor) -> torch.Tensor:
    """Convert wide unsigned types, which torch cannot compare, to int64.

    A uint64 above 2^63 becomes negative.
    """
    wide = values.dtype in (torch.uint16, torch.uint32, torch.uint64)
    return values.detach().to(torch.int64) if wide else values.detach()


def _same_order(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return torch.equal(left, right)
