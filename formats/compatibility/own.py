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


def _lacks_w4a8_kernel(spec: QuantSpec) -> bool:
    """Return True for 4-bit codes for which no kernel multiplies by 8-bit inputs."""
    whole_steps = spec.group_size == CHANNEL or spec.group_size % 32 == 0
    return spec.bits == 4 and not (spec.symmetric and whole_steps)


OWN_RULES: tuple[Rule, ...] = (
    row(
        "own-act-order",
        OURS,
        "slow",
        trait("act-order", "inputs are reordered on every call (act-order)"),
        OWN_SOURCE,
    ),
    row(
        "own-bits",
        OURS,
        "slow",
        any_scheme(
            lambda s: s.weight.type == "int" and s.weight.bits not in (4, 8),
            "there is no dedicated kernel for bits other than 4 and 8",
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
            "4-bit weights with 8-bit activations have kernels for symmetric codes alone, in groups"
            " divisible by 32 or with a scale for each output",
        ),
        OWN_SOURCE,
    ),
)
