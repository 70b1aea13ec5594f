"""Schemes: the numerics of a linear layer.

A *spec* is the numerics of one tensor. A *scheme* is the numerics of a layer, under the name that a
user types:

    w4a16-sym            4-bit weights, 16-bit activations, symmetric, groups of 128
    w4a16-sym-g64        the same in groups of 64
    w8a16-sym-channel    8-bit weights, one scale for each output channel
    w8a8                 int8 weights and activations; scales per output and per token
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from formats.errors import SchemeError
from formats.names import AUTO_GROUPS

DEFAULT_GROUP_SIZE = 128
CHANNEL = -1  # group size that means one group for the whole input
ALL = -1  # number of rows that means every output
FP8_MAX = 448.0  # the largest number of float8_e4m3fn
FP4_TYPES = {
    "mxfp4": 32,
    "nvfp4": 16,
}  # type -> inputs that share a scale (formats/in_memory/fp4.py)
# Types read as float weights (formats/in_memory/dense.py): bitsandbytes' tables, float zeros
DENSE_TYPES = ("nf4", "fp4", "floatzero")
# type -> (bits, symmetric, inputs that share a scale). GGUF's K-quants, whose blocks of 256 inputs
# hold quantized scales and minima (formats/gguf/k_quants/grid.py)
K_TYPES = {"q4_k": (4, False, 32), "q5_k": (5, False, 32), "q6_k": (6, True, 16)}
K_BLOCK = 256  # inputs of a block of K_TYPES
# The same for GGUF's blocks of 32 inputs with a float16 scale and minimum; read but not written
MIN_TYPES = {"q4_1": (4, False, 32), "q5_1": (5, False, 32)}
# The same for GGUF's blocks of 256 inputs with quantized scales that are read but not written. The
# values of IQ4_XS's codes are integers of 8 bits.
READ_K_TYPES = {"q2_k": (2, False, 16), "q3_k": (3, True, 16), "iq4_xs": (8, True, 32)}
# Weights that stay in their file's blocks (formats/in_memory/k_weight.py)
BLOCK_TYPES = K_TYPES | READ_K_TYPES | MIN_TYPES
# Group sizes of Marlin, the fast kernel of vLLM and SGLang, best first; it also takes CHANNEL.
SERVED_GROUPS = (128, 64, 32)
NAMED = "give a scheme by name, such as w4a16-sym"  # remedy
NO_WHOLE_GROUPS = "are not divisible by the group size"  # why a linear does not fit


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantSpec:
    """Numerics of a weight [N, K]: codes in 0..2^bits-1, a scale and a zero per group of inputs.

    `type` says what the codes are:

    - "int": integers;
    - "float": float8_e4m3fn numbers, without zeros;
    - "mxfp4", "nvfp4": 4-bit floating point;
    - DENSE_TYPES, read but not written: codes of "nf4" and "fp4" select values of a table,
      "floatzero" has integer codes with non-integer zero points;
    - BLOCK_TYPES: blocks of a GGUF file; `group_size` is the length of a block.

    `in_multiples`: rounding chooses scales of a row that are whole multiples of one number
    (numerics/multiples.py). Scheme sets it. It is a rule of rounding that no file states, so specs
    that differ in it are equal.
    """

    bits: int
    symmetric: bool
    group_size: int = DEFAULT_GROUP_SIZE  # inputs that share a scale; CHANNEL (-1): all of them
    rows: int = 1  # outputs that share a scale; ALL (-1): all of them. More than 1: float only
    type: Literal[
        *("int", "float", "mxfp4", "nvfp4", "nf4", "fp4", "floatzero"),
        *("q4_k", "q5_k", "q6_k", "q4_1", "q5_1", "q2_k", "q3_k", "iq4_xs"),
    ] = "int"
    in_multiples: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise SchemeError("bits", f"expected 2 to 8, found {self.bits}", NAMED)
        if self.group_size != CHANNEL and self.group_size < 1:
            raise SchemeError(
                "group size", f"expected -1 or a positive number, found {self.group_size}", NAMED
            )
        if self.type == "float" and (self.bits, self.symmetric) != (8, True):
            raise SchemeError(
                "float weights",
                f"expected 8 bits, symmetric, found {self.bits}, symmetric {self.symmetric}",
                NAMED,
            )
        if self.type in FP4_TYPES and (self.bits, self.symmetric, self.group_size) != (
            *(4, True),
            FP4_TYPES[self.type],
        ):
            raise SchemeError(
                f"{self.type} weights",
                f"expected 4 bits in groups of {FP4_TYPES[self.type]}, found {self.bits} bits in"
                " groups"
                f" of {self.group_size}",
                NAMED,
            )
        if self.type in BLOCK_TYPES and (self.bits, self.symmetric, self.group_size) != (
            *BLOCK_TYPES[self.type][:2],
            block_length(self.type),
        ):
            length = block_length(self.type)
            raise SchemeError(
                f"{self.type} weights",
                f"expected blocks of {length} inputs, found {self.group_size}",
                NAMED,
            )
        if self.type != "float" and self.rows != 1:
            raise SchemeError("rows", f"expected 1 for integer codes, found {self.rows}", NAMED)

    @property
    def max_code(self) -> int:
        return 2**self.bits - 1

    @property
    def symmetric_zero(self) -> int:
        """Return the zero point of every symmetric group: the middle code."""
        return 2 ** (self.bits - 1)

    @property
    def integer_form(self) -> "QuantSpec":
        """Return an integer spec with as many bits and the same groups, to estimate BLOCK_TYPES."""
        if self.type not in BLOCK_TYPES:
            return self
        bits, symmetric, group_size = BLOCK_TYPES[self.type]
        return QuantSpec(bits=bits, symmetric=symmetric, group_size=group_size)

    def group_length(self, in_features: int) -> int:
        return in_features if self.group_size == CHANNEL else self.group_size

    def num_groups(self, in_features: int) -> int:
        return in_features // self.group_length(in_features)

    def check_shape(self, name: str, out_features: int, in_features: int) -> None:
        """Raise SchemeError, naming the layer, if groups do not divide a weight of this shape."""
        if out_features < 1 or in_features < 1:
            raise SchemeError(
                name, f"is empty: [{out_features}, {in_features}]", "leave it in float"
            )
        length = self.group_length(in_features)
        if in_features % length and self.type != "float" and self.type not in DENSE_TYPES:
            raise SchemeError(
                name,
                f"its {in_features} inputs {NO_WHOLE_GROUPS} {length}",
                groups_that_fit(in_features),
            )


def block_length(type: str) -> int:
    """Return the inputs of a block of BLOCK_TYPES."""
    return BLOCK_TYPES[type][2] if type in MIN_TYPES else K_BLOCK


def block_scheme(type: str) -> "Scheme":
    """Return the scheme of weights in blocks of BLOCK_TYPES."""
    bits, symmetric, _ = BLOCK_TYPES[type]
    size = block_length(type)
    return Scheme(weight=QuantSpec(bits=bits, symmetric=symmetric, group_size=size, type=type))


# float8 with a power-of-two scale per 32 inputs (formats/codecs/microscaling.py)
MXFP8 = QuantSpec(bits=8, symmetric=True, group_size=32, type="float")


def fitting_group_size(in_features: Iterable[int]) -> int:
    """Return the largest of SERVED_GROUPS that divides every number of inputs, else CHANNEL."""
    in_features = set(in_features)
    fitting = (size for size in SERVED_GROUPS if all(K % size == 0 for K in in_features))
    return next(fitting, CHANNEL)


def groups_that_fit(in_features: int) -> str:
    """Return a remedy: the `group_size` values that divide a number of inputs."""
    served = [str(size) for size in SERVED_GROUPS if in_features % size == 0]
    if served:
        return f"give `group_size` {' or '.join(served)}, or {AUTO_GROUPS!r}"
    others = [str(size) for size in (96, 80, 48, 40, 24, 16, 8) if in_features % size == 0]
    text = f"give `group_size` {CHANNEL} (one group)"
    if others:
        text += f" or {others[0]}, which vLLM takes only as compressed-tensors"
    return text


def checked_group_size(
    value: object, name: str = "group size", remedy: str = "give a multiple of 8, such as 128"
) -> int:
    """Check a group size from a user or a config. Raises SchemeError, with `remedy`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise SchemeError(name, f"expected a number, found {value!r}", remedy)
    if value != CHANNEL and (value < 8 or value % 8 or value > 2**20):
        raise SchemeError(name, f"expected -1 or a multiple of 8, found {value}", remedy)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSpec:
    """Numerics of a linear's input. Codes are symmetric; the checkpoint holds static scales.

    A file may state fewer than 8 bits, but no kernel supports them.
    """

    bits: int = 8
    type: Literal["int", "float"] = "int"
    dynamic: bool = True
    per: Literal["token", "tensor", "group"] = "token"  # extent that shares a scale
    group_size: int = DEFAULT_GROUP_SIZE  # channels that share a scale if `per` is "group"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Quantization of one linear layer. `activation` None: the input stays in 16 bits."""

    weight: QuantSpec
    activation: ActivationSpec | None = None

    def __post_init__(self) -> None:
        in_multiples = self.sums_integers
        if self.weight.in_multiples != in_multiples:
            weight = replace(self.weight, in_multiples=in_multiples)
            object.__setattr__(self, "weight", weight)

    @property
    def sums_integers(self) -> bool:
        """True for symmetric 4-bit weights in groups and int8 inputs.

        Their products can be summed as integers to the end, if the scales of a row are multiples.
        """
        spec, activation = self.weight, self.activation
        int8 = activation is not None and (activation.bits, activation.type) == (8, "int")
        four = (spec.bits, spec.symmetric, spec.type) == (4, True, "int")
        return int8 and four and spec.group_size != CHANNEL and activation.per != "group"

    @classmethod
    def parse(cls, text: "str | Scheme", group_size: int | None = None) -> "Scheme":
        """Read a scheme's printed form; `group_size` replaces the default. Raises SchemeError."""
        if isinstance(text, Scheme):
            return text
        if not isinstance(text, str):
            raise SchemeError("scheme", f"expected a name, found {text!r:.80}", NAMED)
        name, suffix = re.fullmatch(r"(.*?)(-g\d{1,9}|-channel)?", text, re.DOTALL).groups()
        name = SCHEME_ALIASES.get(name, name)
        if text in MICROSCALED:
            if group_size not in (None, MICROSCALED[text].weight.group_size):
                raise SchemeError(f"scheme {text!r}", "its scales are fixed", "give no group size")
            return MICROSCALED[text]
        if name not in SCHEMES:
            if suffix is not None and suffix != "-channel":
                checked_group_size(int(suffix[2:]))
            if f"{name}-sym" in SCHEMES:
                forms = f"{name}-sym{suffix or ''} or {name}-asym{suffix or ''}"
                raise SchemeError(f"scheme {text!r}", "is neither sym nor asym", f"give {forms}")
            known = [*SCHEMES, *MICROSCALED]
            near = difflib.get_close_matches(text.lower(), list(SCHEMES), 1)
            remedy = f"did you mean {near[0]}? " if near else ""
            remedy += f"known schemes: {', '.join(known)}"
            raise SchemeError(f"scheme {text!r}", "unknown", remedy)
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

    @classmethod
    def of_scales(
        cls, text: "str | Scheme", num_groups: int, in_features: int, name: str = "weight"
    ) -> "Scheme":
        """Read a scheme; its group size follows from scales [N, num_groups] unless it names one.

        Raises SchemeError, with `name`, if that many groups do not divide the inputs.
        """
        scheme = cls.parse(text)
        spec = scheme.weight
        states_groups = isinstance(text, Scheme) or text in FIXED_SCHEMES or text not in SCHEMES
        if states_groups or (
            in_features % spec.group_length(in_features) == 0
            and spec.num_groups(in_features) == num_groups
        ):
            return scheme
        if num_groups < 1 or in_features % num_groups:
            raise SchemeError(
                name,
                f"its {in_features} inputs do not make {num_groups} equal groups",
                "give scales as [outputs, groups]",
            )
        size = CHANNEL if num_groups == 1 else in_features // num_groups
        return replace(scheme, weight=replace(spec, group_size=checked_group_size(size, name)))

    def __str__(self) -> str:
        for name, scheme in (FIXED_SCHEMES | MICROSCALED).items():
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
        """Describe a scheme of another tool that SCHEMES does not name.

        `parse` does not read this text.
        """
        spec, activation = self.weight, self.activation
        if spec.type in BLOCK_TYPES:
            return spec.type
        kind = "fp8" if spec.type == "float" else "sym" if spec.symmetric else "asym"
        kind = "mxfp8" if spec == MXFP8 else kind
        kind = spec.type if spec.type not in ("int", "float") else kind
        share = "channel" if spec.group_size == CHANNEL else f"g{spec.group_size}"
        share = share if spec.rows == 1 else "tensor" if spec.rows == ALL else f"block{spec.rows}"
        text = f"w{spec.bits}a{activation.bits if activation else 16}-{kind}-{share}"
        if activation is None:
            return text
        when = "dynamic" if activation.dynamic else "static"
        return f"{text}-{activation.type}{activation.bits}-{when}-{activation.per}"


_INT8 = QuantSpec(bits=8, symmetric=True, group_size=CHANNEL)
_FP8 = QuantSpec(bits=8, symmetric=True, group_size=CHANNEL, type="float")
_STATIC_INT8 = ActivationSpec(dynamic=False, per="tensor")
_STATIC_FP8 = ActivationSpec(type="float", dynamic=False, per="tensor")

# Schemes with fixed groups
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
# Schemes that `quantize` writes in full for programs with such kernels. This project reads and
# runs them with 16-bit inputs. An activation of 4 bits that is not dynamic has one calibrated
# scale for the tensor, and a float8 scale for each group of a token's inputs.
MICROSCALED: dict[str, Scheme] = {
    "w4a4-nvfp4": Scheme(
        weight=QuantSpec(bits=4, symmetric=True, group_size=16, type="nvfp4"),
        activation=ActivationSpec(bits=4, type="float", dynamic=False, per="group", group_size=16),
    ),
    "w4a4-mxfp4": Scheme(
        weight=QuantSpec(bits=4, symmetric=True, group_size=32, type="mxfp4"),
        activation=ActivationSpec(bits=4, type="float", per="group", group_size=32),
    ),
    "w8a8-mxfp8": Scheme(
        weight=MXFP8, activation=ActivationSpec(type="float", per="group", group_size=32)
    ),
    "w8a16-mxfp8": Scheme(weight=MXFP8),
}
_INT4 = QuantSpec(bits=4, symmetric=True)
# 4-bit weights in groups with 8-bit activations
W4A8: dict[str, Scheme] = {
    "w4a8": Scheme(weight=_INT4, activation=ActivationSpec()),
    "w4a8-fp8": Scheme(weight=_INT4, activation=ActivationSpec(type="float")),
}
# name -> scheme, with the default group size if there is a choice
SCHEMES: dict[str, Scheme] = {
    **{
        f"w{bits}a16-{kind}": Scheme(weight=QuantSpec(bits=bits, symmetric=kind == "sym"))
        for bits in (4, 8, 2, 3, 6)
        for kind in ("sym", "asym")
    },
    **W4A8,
    **FIXED_SCHEMES,
}
# other tools' names -> the scheme's name
SCHEME_ALIASES = {"fp8": "w8a8-fp8"}


def microscaled_inputs(scheme: Scheme) -> ActivationSpec | None:
    """Return the input rounding of MICROSCALED schemes, which no kernel supports; None: other."""
    return scheme.activation if scheme in MICROSCALED.values() else None


def w4a8_name(scheme: Scheme) -> str | None:
    """Return the name of the W4A8 scheme, ignoring its group size."""
    if scheme.weight.type != "int":
        return None
    usual = replace(scheme, weight=replace(scheme.weight, group_size=DEFAULT_GROUP_SIZE))
    return next((name for name, row in W4A8.items() if row == usual), None)
