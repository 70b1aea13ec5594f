"""Rules on cases that this project refuses, or runs without a dedicated kernel."""

from formats.compatibility.loads_in import Rule
from formats.compatibility.terms import (
    OURS,
    OWN_SOURCE,
    any_scheme,
    is_w4a8,
    row,
    trait,
    when,
)
from formats.scheme import CHANNEL, QuantSpec


def _is_whole(spec: QuantSpec) -> bool:
    """Return True if groups are whole steps of the kernels' loops over inputs."""
    return spec.group_size == CHANNEL or spec.group_size % 32 == 0


def _lacks_w4a8_kernel(spec: QuantSpec) -> bool:
    """Return True for codes under 8 bits for which no kernel multiplies by 8-bit inputs."""
    return not (spec.bits == 4 and spec.symmetric and _is_whole(spec))


OWN_RULES: tuple[Rule, ...] = (
    row(
        "own-act-order",
        OURS,
        "slow",
        trait("act-order", "inputs are reordered on every call (act-order)"),
        OWN_SOURCE,
    ),
    row(
        "own-groups",
        OURS,
        "slow",
        any_scheme(
            lambda s: s.weight.type == "int" and s.activation is None and not _is_whole(s.weight),
            "GPU kernels take groups divisible by 32: others are dequantized at each product",
        ),
        OWN_SOURCE,
    ),
    row(
        "own-narrow-inputs",
        OURS,
        "no",
        lambda f: (
            f.config is not None
            and f.config.narrow_inputs
            and "refuses 4-bit integer activations (W4A4) without --activation-bits 8 or 16, which"
            " run it with wider activations"
        ),
        OWN_SOURCE,
    ),
    row(
        "own-input-factors",
        OURS,
        "slow",
        trait(
            "input factors",
            "inputs are multiplied by pre_quant_scale: such linears are read as float weights",
        ),
        OWN_SOURCE,
    ),
    row(
        "own-inputs",
        OURS,
        "slow",
        when(
            lambda f: f.config is not None and f.config.unrounded_inputs,
            "inputs stay in 16 bits: no kernel rounds them as the file states",
        ),
        OWN_SOURCE,
    ),
    row(
        "own-w4a8",
        OURS,
        "slow",
        any_scheme(
            lambda s: (is_w4a8(s, "int") or is_w4a8(s, "float")) and _lacks_w4a8_kernel(s.weight),
            "among weights under 8 bits with 8-bit activations, only symmetric 4-bit codes have"
            " kernels, in groups divisible by 32 or with a scale for each output",
        ),
        OWN_SOURCE,
    ),
)
