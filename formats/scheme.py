"""Schemes: which numerics a linear layer has. Knows the names, not the bytes.

A *spec* is the numerics of one tensor; a *scheme* is what a layer is given and what a user types:

    w4a16-sym            4-bit weights, 16-bit activations, symmetric, groups of 128
    w4a16-sym-g64        the same in groups of 64
    w8a16-sym-channel    8-bit weights, one scale for each output channel
    w8a8                 int8 weights and activations; scales per output and per token
"""

import re
from dataclasses import dataclass, replace
from typing import Literal

from formats.errors import SchemeError

DEFAULT_GROUP_SIZE = 128
CHANNEL = -1  # the group size that means "one group: the whole input"
ALL = -1  # the number of rows that means "every output"
FP8_MAX = 448.0  # the largest number of float8_e4m3fn
FP4_TYPES = {"mxfp4": 32, "nvfp4": 16}  # formats/fp4.py: inputs that share a scale


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantSpec:
    """Numerics of a weight [N, K]: codes in 0..2^bits-1, a scale and a zero per group of inputs.

    `type` "float" means float8_e4m3fn numbers in place of codes, and no zeros; "mxfp4" and "nvfp4"
    mean 4-bit ones.
    """

    bits: int
    symmetric: bool
    group_size: int = DEFAULT_GROUP_SIZE  # inputs that share a scale; CHANNEL (-1): all of them
    rows: int = 1  # outputs that share a scale; ALL (-1): all of them. More than 1: float only
    type: Literal["int", "float", "mxfp4", "nvfp4"] = "int"

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise SchemeError("bits", f"expected 2 to 8, found {self.bits}")
        if self.group_size != CHANNEL and self.group_size < 1:
            raise SchemeError(
                "group size", f"expected -1 or a positive number, found {self.group_size}"
            )
        if self.type == "float" and (self.bits, self.symmetric) != (8, True):
            raise SchemeError("float weights", "expected 8 bits, symmetric")
        if self.type in FP4_TYPES and (self.bits, self.symmetric, self.group_size) != (
            *(4, True),
            FP4_TYPES[self.type],
        ):
            raise SchemeError(
                f"{self.type} weights", f"expected 4 bits in groups of {FP4_TYPES[self.type]}"
            )
        if self.type != "float" and self.rows != 1:
            raise SchemeError("rows", f"integer codes have a scale for each row, not {self.rows}")

    @property
    def max_code(self) -> int:
        return 2**self.bits - 1

    @property
    def symmetric_zero(self) -> int:
        """The zero point of every symmetric group: the middle of the codes."""
        return 2 ** (self.bits - 1)

    def group_length(self, in_features: int) -> int:
        return in_features if self.group_size == CHANNEL else self.group_size

    def num_groups(self, in_features: int) -> int:
        return in_features // self.group_length(in_features)

    def check_shape(self, name: str, out_features: int, in_features: int) -> None:
        """Raise SchemeError, naming the layer, where a weight of this shape has no whole groups."""
        if out_features < 1 or in_features < 1:
            raise SchemeError(name, f"is empty: [{out_features}, {in_features}]")
        length = self.group_length(in_features)
        if in_features % length and self.type != "float":
            raise SchemeError(
                name,
                f"its {in_features} inputs are not divisible by the group size {length}",
                f"use a --group-size that divides {in_features}",
            )


def checked_group_size(value: object, name: str = "group size") -> int:
    """A group size that a user or a config states. Raises SchemeError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise SchemeError(name, f"expected a number, found {value!r}")
    if value != CHANNEL and (value < 8 or value % 8 or value > 2**20):
        raise SchemeError(name, f"expected -1 or a multiple of 8, found {value}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSpec:
    """Numerics of a linear's input: 8 bits, symmetric. Static scales stand in the checkpoint."""

    type: Literal["int", "float"] = "int"
    dynamic: bool = True
    per: Literal["token", "tensor", "group"] = "token"  # what shares a scale
    group_size: int = DEFAULT_GROUP_SIZE  # channels that share one, where `per` is "group"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How one linear layer is quantized. `activation` None: the input stays in 16 bits."""

    weight: QuantSpec
    activation: ActivationSpec | None = None

    @classmethod
    def parse(cls, text: "str | Scheme", group_size: int | None = None) -> "Scheme":
        """Read a scheme's printed form; `group_size` replaces the default. Raises SchemeError."""
        if isinstance(text, Scheme):
            return text
        name, suffix = re.fullmatch(r"(.*?)(-g\d{1,9}|-channel)?", text, re.DOTALL).groups()
        if name not in SCHEMES:
            raise SchemeError(f"scheme {text!r}", "unknown", f"known schemes: {', '.join(SCHEMES)}")
        scheme = SCHEMES[name]
        if suffix is not None:
            stated = CHANNEL if suffix == "-channel" else int(suffix[2:])
            if group_size not in (None, stated):
                raise SchemeError(
                    f"scheme {text!r}", f"names another group size than {group_size}", "give one"
                )
            group_size = stated
        if group_size is None:
            return scheme
        if name in FIXED_SCHEMES:
            if group_size == scheme.weight.group_size:
                return scheme
            raise SchemeError(f"scheme {name!r}", "its scales are fixed", "give no group size")
        weight = replace(scheme.weight, group_size=checked_group_size(group_size))
        return replace(scheme, weight=weight)

    def __str__(self) -> str:
        for name, scheme in FIXED_SCHEMES.items():
            if self == scheme:
                return name
        spec = self.weight
        name = None
        if self.activation is None and spec.type == "int":
            name = f"w{spec.bits}a16-{'sym' if spec.symmetric else 'asym'}"
        name = w4a8_name(self) or name
        if name is None:
            return self._description()
        if spec.group_size == DEFAULT_GROUP_SIZE:
            return name
        return name + ("-channel" if spec.group_size == CHANNEL else f"-g{spec.group_size}")

    def _description(self) -> str:
        """Of what other tools write and no row of SCHEMES names; not read back."""
        spec, activation = self.weight, self.activation
        kind = "fp8" if spec.type == "float" else "sym" if spec.symmetric else "asym"
        kind = spec.type if spec.type in FP4_TYPES else kind
        share = "channel" if spec.group_size == CHANNEL else f"g{spec.group_size}"
        share = share if spec.rows == 1 else "tensor" if spec.rows == ALL else f"block{spec.rows}"
        text = f"w{spec.bits}a{8 if activation else 16}-{kind}-{share}"
        if activation is None:
            return text
        when = "dynamic" if activation.dynamic else "static"
        return f"{text}-{activation.type}8-{when}-{activation.per}"


_INT8 = QuantSpec(bits=8, symmetric=True, group_size=CHANNEL)
_FP8 = QuantSpec(bits=8, symmetric=True, group_size=CHANNEL, type="float")
_STATIC_INT8 = ActivationSpec(dynamic=False, per="tensor")
_STATIC_FP8 = ActivationSpec(type="float", dynamic=False, per="tensor")

# Schemes whose scales are shared in one way only
FIXED_SCHEMES: dict[str, Scheme] = {
    "w8a8": Scheme(weight=_INT8, activation=ActivationSpec()),
    "w8a8-static": Scheme(weight=_INT8, activation=_STATIC_INT8),
    "w8a8-fp8": Scheme(weight=_FP8, activation=ActivationSpec(type="float")),
    "w8a8-fp8-static": Scheme(weight=replace(_FP8, rows=ALL), activation=_STATIC_FP8),
    "w8a8-fp8-block": Scheme(
        weight=replace(_FP8, group_size=128, rows=128),
        activation=ActivationSpec(type="float", per="group"),
    ),
    "w8a16-fp8": Scheme(weight=_FP8),
    **{
        f"w4a16-{kind}": Scheme(
            weight=QuantSpec(bits=4, symmetric=True, group_size=length, type=kind)
        )
        for kind, length in FP4_TYPES.items()
    },
}
_INT4 = QuantSpec(bits=4, symmetric=True)
# 4-bit weights in groups beside 8-bit activations
W4A8: dict[str, Scheme] = {
    "w4a8": Scheme(weight=_INT4, activation=ActivationSpec()),
    "w4a8-fp8": Scheme(weight=_INT4, activation=ActivationSpec(type="float")),
}
# name -> scheme, with the default group size where there is a choice
SCHEMES: dict[str, Scheme] = {
    **{
        f"w{bits}a16-{kind}": Scheme(weight=QuantSpec(bits=bits, symmetric=kind == "sym"))
        for bits in (4, 8, 2, 3, 6)
        for kind in ("sym", "asym")
    },
    **W4A8,
    **FIXED_SCHEMES,
}


def w4a8_name(scheme: Scheme) -> str | None:
    """The row of W4A8 that a scheme is, whatever its groups."""
    if scheme.weight.type != "int":
        return None
    usual = replace(scheme, weight=replace(scheme.weight, group_size=DEFAULT_GROUP_SIZE))
    return next((name for name, row in W4A8.items() if row == usual), None)
