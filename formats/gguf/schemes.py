"""Schemes of GGUF's block types, mixes of types, and fallbacks of K-quants.

A mix gives some linears a wider type, as llama.cpp does; formats/README.md states the rule.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from formats.architecture.family import Family
from formats.errors import SchemeError
from formats.rules import LAYER_NUMBER
from formats.scheme import K_BLOCK, K_TYPES, QuantSpec, Scheme, block_scheme

BLOCK = 32  # inputs per block, in types other than K-quants


def _integers(bits: int, symmetric: bool) -> Scheme:
    return Scheme(weight=QuantSpec(bits=bits, symmetric=symmetric, group_size=BLOCK))


# block type -> scheme with the same numbers
BLOCK_SCHEMES: dict[str, Scheme] = {
    "q4_0": _integers(4, True),
    "q4_1": _integers(4, False),
    "q5_0": _integers(5, True),
    "q5_1": _integers(5, False),
    "q8_0": _integers(8, True),
    **{name: block_scheme(name) for name in K_TYPES},
}
# K-quant -> type for linears whose inputs are not whole blocks of 256
FALLBACKS = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}


OUTER_TYPES = ("q8_0", "q8_0")  # types of the embedding and of a float head


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """A mix: the type of most linears, and wider types of the others."""

    base: str
    wide: str  # type of v and down in layers of `gets_more_bits`, of head and tied embedding
    qkv: str  # type of a fused q, k, v matrix


MIXES: dict[str, Mix] = {
    "q4_k_m": Mix(base="q4_k", wide="q6_k", qkv="q5_k"),
    "q5_k_m": Mix(base="q5_k", wide="q6_k", qkv="q6_k"),
}


def base_scheme(name: str) -> Scheme:
    """Return the scheme of most linears in a type or a mix. Raises SchemeError."""
    name = MIXES[name].base if name in MIXES else name
    if name not in BLOCK_SCHEMES:
        known = ", ".join([*BLOCK_SCHEMES, *MIXES])
        raise SchemeError(f"type {name!r}", "unknown", f"known types: {known}")
    return BLOCK_SCHEMES[name]


def name_of(scheme: Scheme) -> str:
    """Return the block type of a scheme. Raises SchemeError if there is none."""
    for name, row in BLOCK_SCHEMES.items():
        if row == scheme:
            return name
    raise SchemeError(
        f"scheme {scheme}", "is no type of GGUF's blocks", f"use {', '.join(BLOCK_SCHEMES)}"
    )


def gets_more_bits(layer: int, num_layers: int) -> bool:
    """Return True for the first and last eighth of the layers, and every third layer between."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def fitting(scheme: Scheme, in_features: int) -> Scheme:
    """Return the scheme, or a K-quant's fallback if the inputs are not whole blocks."""
    name = FALLBACKS.get(scheme.weight.type)
    return scheme if name is None or in_features % K_BLOCK == 0 else BLOCK_SCHEMES[name]


def types_of_linears(
    name: str, shapes: Mapping[str, tuple[int, int]], family: Family, num_layers: int
) -> dict[str, Scheme]:
    """Return the scheme of every linear of `shapes` ([N, K] by name) for a type or a mix."""
    mix = MIXES.get(name)
    if mix is None:
        return dict.fromkeys(shapes, BLOCK_SCHEMES[name])
    from formats.gguf.names import linear_names, other_names  # imports tables of architectures

    names = {**linear_names(family), **other_names(family, ""), **other_names(family, "{e}")}
    leaves = {ours.rpartition(".")[2]: theirs for theirs, ours in names.items()}
    found = {}
    for module in shapes:
        theirs, number = leaves.get(module.rpartition(".")[2], ""), LAYER_NUMBER.search(module)
        is_wide = theirs == "attn_v" or theirs.startswith("ffn_down")
        kind = mix.base
        if theirs == "attn_qkv":
            kind = mix.qkv
        elif is_wide and number and gets_more_bits(int(number[1]), num_layers):
            kind = mix.wide
        found[module] = BLOCK_SCHEMES[kind]
    return found


def outer_types(name: str, is_tied: bool) -> tuple[str, str]:
    """Return the types of the embedding and of a float head."""
    mix = MIXES.get(name)
    if mix is None:
        return OUTER_TYPES
    return (mix.wide if is_tied else mix.base), mix.wide
