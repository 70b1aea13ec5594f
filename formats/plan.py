"""Which linear gets which scheme, decided before a weight is read. Knows shapes, not weights."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase

from formats.errors import InputError, SchemeError
from formats.layouts import (
    Layout,
    check_holds_groups,
    check_holds_kv_scales,
    check_writable,
    default_format,
    find_layout,
    why_not,
)
from formats.padding import Padding
from formats.patterns import regex
from formats.quant_config import QuantConfig
from formats.rules import FUSED
from formats.scheme import CHANNEL, Scheme

ACT_ORDER_FORMAT = "gptq"  # the only one that is written with an index of groups
EXCEPTIONS_FORMAT = "compressed-tensors"  # what every reader takes where linears differ


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The scheme of every linear; None: it stays in float. `reasons` says why, by name."""

    layout: Layout
    schemes: dict[str, Scheme | None]
    reasons: dict[str, str]
    padding: Padding | None = None
    kv_cache: str | None = None  # "int8" or "fp8": scales for such a KV cache are written too
    kv_per_head: bool = False  # each KV head gets scales of its own
    act_order: bool = False  # groups have the inputs that a solver gives them

    @property
    def quantized(self) -> dict[str, Scheme]:
        return {name: scheme for name, scheme in self.schemes.items() if scheme is not None}

    @property
    def has_exceptions(self) -> bool:
        """Do linears differ, so that the config block names some of them?"""
        return len(set(self.schemes.values())) > 1

    @property
    def warnings(self) -> tuple[str, ...]:
        """Who will not load what is to be written."""
        found = []
        if self.act_order and any(s.weight.group_size != CHANNEL for s in self.quantized.values()):
            found.append(
                "act-order is written: transformers, GPTQModel and SGLang load it and order the"
                " inputs on every call, which is slow; vLLM 0.33 refuses it"
            )
        if self.layout.name == "gptq" and self.has_exceptions:
            found.append(
                "transformers ignores the dynamic entries of a GPTQ block, which say what differs"
                " here, and will not load the folder: --format compressed-tensors loads there too"
            )
        return tuple(found)

    def config(self, quantizer: str) -> QuantConfig:
        """The config block's object."""
        return QuantConfig.of_modules(
            self.layout.name,
            self.schemes,
            quantizer,
            kv_cache=self.kv_cache,
            act_order=self.act_order,
            kv_per_head=self.kv_per_head,
        )


def make_plan(
    shapes: Mapping[str, tuple[int, int]],
    scheme: Scheme,
    *,
    output_format: str | None = None,
    ignore: Sequence[str] = (),
    overrides: Iterable[tuple[str, Scheme]] = (),
    padding: Padding | None = None,
    kv_cache: str | None = None,
    kv_per_head: bool = False,
    act_order: bool = False,
    kept: Mapping[str, str] | None = None,
) -> Plan:
    """Decide for every linear of `shapes` ([N, K] by name).

    `kept`: others, which stay in float whatever is asked for, and why. `ignore` and `overrides`
    have patterns (see `fits`); the first override that fits wins, and what is ignored stays in
    float. A linear whose shape does not fit stays in float, and with it
    those that servers load as one matrix with it. Raises InputError where a pattern fits nothing,
    a scheme cannot be written, or nothing is left to quantize.

    Without an `output_format` it is the scheme's default, but compressed-tensors where that can
    hold what differs and the default cannot, or where transformers could not read it.
    """
    overrides = list(overrides)
    arguments = (
        *(shapes, scheme, ignore, overrides, padding, kv_cache, kv_per_head, act_order),
        kept or {},
    )
    if output_format is not None:
        return _plan(find_layout(output_format), *arguments)
    if act_order:
        return _plan(find_layout(ACT_ORDER_FORMAT), *arguments)
    layout, other = find_layout(default_format(scheme)), find_layout(EXCEPTIONS_FORMAT)
    try:
        plan = _plan(layout, *arguments)
    except InputError:
        if layout is other:
            raise
        with suppress(InputError):
            return _plan(other, *arguments)
        raise
    if plan.warnings:
        with suppress(InputError):
            return _plan(other, *arguments)
    return plan


def _plan(
    layout: Layout,
    shapes: Mapping[str, tuple[int, int]],
    scheme: Scheme,
    ignore: Sequence[str],
    overrides: Sequence[tuple[str, Scheme]],
    padding: Padding | None,
    kv_cache: str | None,
    kv_per_head: bool,
    act_order: bool,
    kept: Mapping[str, str],
) -> Plan:
    """The plan in one layout."""
    check_holds_groups(layout, act_order)
    check_holds_kv_scales(layout, kv_cache)
    for each in (scheme, *(other for _, other in overrides)):
        check_writable(layout, each)
    for pattern in (*ignore, *(pattern for pattern, _ in overrides)):
        if not any(fits(pattern, name) for name in shapes):
            raise InputError(
                f"pattern {pattern!r}", "fits no linear", f"one of them is {next(iter(shapes), '')}"
            )
    schemes: dict[str, Scheme | None] = {}
    reasons: dict[str, str] = {}
    for name, shape in shapes.items():
        shape = padding.shape(name, shape) if padding else shape
        wanted = next((other for pattern, other in overrides if fits(pattern, name)), scheme)
        if any(fits(pattern, name) for pattern in ignore):
            reason = "ignored"
        else:
            reason = why_not(layout, wanted, *shape)
        schemes[name] = None if reason else wanted
        if reason:
            reasons[name] = reason
    schemes |= dict.fromkeys(kept)
    reasons |= kept
    _agree_in_fused(schemes, reasons)
    plan = Plan(
        layout=layout,
        schemes=schemes,
        reasons=reasons,
        padding=padding,
        kv_cache=kv_cache,
        kv_per_head=kv_per_head,
        act_order=act_order,
    )
    if not plan.quantized:
        name, reason = next(iter(reasons.items()))
        raise SchemeError(name, reason, "no linear can be quantized like this")
    plan.config("")  # raises what the format cannot say of single modules
    return plan


def fits(pattern: str, name: str) -> bool:
    """Does a user's pattern fit a linear's name?

    "re:..." is a regular expression from the start of the name; a text with * or ? is matched
    against the whole name; any other is a part of it.
    """
    if pattern.startswith("re:"):
        return regex(pattern.removeprefix("re:")).matches(name)
    if "*" in pattern or "?" in pattern:
        return fnmatchcase(name, pattern)
    return pattern in name


def fits_any(overrides: Iterable[tuple[str, Scheme]], name: str) -> bool:
    """Does any of the patterns fit a linear's name?"""
    return any(fits(pattern, name) for pattern, _ in overrides)


def parse_override(text: str) -> tuple[str, Scheme]:
    """ "PATTERN=SCHEME", as a flag says it. Raises InputError."""
    pattern, equals, scheme = text.rpartition("=")
    if not equals or not pattern:
        raise InputError(f"override {text!r}", "expected PATTERN=SCHEME")
    return pattern, Scheme.parse(scheme)


def _agree_in_fused(schemes: dict[str, Scheme | None], reasons: dict[str, str]) -> None:
    """Servers load a fused matrix in one scheme only: float if one member has to be."""
    for name in list(schemes):
        parent, dot, local = name.rpartition(".")
        for members in FUSED:
            if local != members[0]:
                continue
            present = [parent + dot + m for m in members if parent + dot + m in schemes]
            lost = next((member for member in present if schemes[member] is None), None)
            for member in present:
                if lost is not None and schemes[member] is not None:
                    schemes[member] = None
                    reasons[member] = f"is one matrix with {lost.rpartition('.')[2]} in servers"
            if len({schemes[member] for member in present}) > 1:
                text = ", ".join(f"{m.rpartition('.')[2]} {schemes[m]}" for m in present)
                raise SchemeError(
                    parent, f"{text}: servers load these as one matrix", "give them one scheme"
                )
