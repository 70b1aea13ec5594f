"""Schemes: which numerics a linear layer's weight has. Knows the names, not the bytes.

A *spec* is the numerics of one tensor; a *scheme* is what a layer is given and what a user types:

    w4a16-sym            4-bit weights, 16-bit activations, symmetric, groups of 128
    w4a16-sym-g64        the same in groups of 64
    w8a16-sym-channel    8-bit weights, one scale for each output channel
"""

import re
from dataclasses import dataclass, replace

from formats.errors import SchemeError

DEFAULT_GROUP_SIZE = 128
CHANNEL = -1  # the group size that means "one group: the whole input"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantSpec:
    """Numerics of a weight [N, K]: codes in 0..2^bits-1, a scale and a zero per group of inputs."""

    bits: int
    symmetric: bool
    group_size: int = DEFAULT_GROUP_SIZE  # inputs that share a scale; CHANNEL (-1): all of them

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise SchemeError("bits", f"expected 2 to 8, found {self.bits}")
        if self.group_size != CHANNEL and (self.group_size < 8 or self.group_size % 8):
            raise SchemeError(
                "group size", f"expected -1 or a multiple of 8, found {self.group_size}"
            )

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
        """Raise SchemeError, naming the layer, where a weight of this shape cannot be packed."""
        if out_features < 1 or in_features < 1:
            raise SchemeError(name, f"is empty: [{out_features}, {in_features}]")
        length = self.group_length(in_features)
        if in_features % length:
            raise SchemeError(
                name,
                f"its {in_features} inputs are not divisible by the group size {length}",
                f"use a --group-size that divides {in_features}",
            )
        if out_features % 32 or in_features % 32:
            raise SchemeError(
                name,
                f"expected a shape divisible by 32 both ways, found"
                f" [{out_features}, {in_features}]",
                "this layer cannot be packed; keep the model in float",
            )


# name -> spec with the default group size
SCHEMES: dict[str, QuantSpec] = {
    "w4a16-sym": QuantSpec(bits=4, symmetric=True),
    "w4a16-asym": QuantSpec(bits=4, symmetric=False),
    "w8a16-sym": QuantSpec(bits=8, symmetric=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How one linear layer is quantized. Activations stay in 16 bits in every scheme so far."""

    weight: QuantSpec

    @classmethod
    def parse(cls, text: "str | Scheme", group_size: int | None = None) -> "Scheme":
        """Read a scheme's printed form; `group_size` replaces the default. Raises SchemeError."""
        if isinstance(text, Scheme):
            return text
        name, suffix = re.fullmatch(r"(.*?)(-g\d+|-channel)?", text, re.DOTALL).groups()
        if name not in SCHEMES:
            raise SchemeError(f"scheme {text!r}", "unknown", f"known schemes: {', '.join(SCHEMES)}")
        if suffix is not None:
            stated = CHANNEL if suffix == "-channel" else int(suffix[2:])
            if group_size not in (None, stated):
                raise SchemeError(
                    f"scheme {text!r}", f"names another group size than {group_size}", "give one"
                )
            group_size = stated
        spec = SCHEMES[name]
        return cls(weight=spec if group_size is None else replace(spec, group_size=group_size))

    def __str__(self) -> str:
        spec = self.weight
        name = f"w{spec.bits}a16-{'sym' if spec.symmetric else 'asym'}"
        if spec.group_size == DEFAULT_GROUP_SIZE:
            return name
        return name + ("-channel" if spec.group_size == CHANNEL else f"-g{spec.group_size}")
