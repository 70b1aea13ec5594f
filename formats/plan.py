"""Choose each linear's scheme from shapes, before any weight is read."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from formats.architecture.padding import Padding
from formats.errors import InputError, SchemeError
from formats.gguf.schemes import BLOCK_SCHEMES
from formats.layouts import (
    STAGED_LAYOUTS,
    Layout,
    check_holds_groups,
    check_holds_kv_scales,
    check_writable,
    default_format,
    find_layout,
    why_not,
)
from formats.names import AUTO_GROUPS
from formats.patterns import regex
from formats.quant_config import QuantConfig
from formats.rules import FUSED
from formats.scheme import (
    CHANNEL,
    FIXED_SCHEMES,
    MICROSCALED,
    NO_WHOLE_GROUPS,
    SERVED_GROUPS,
    Scheme,
    fitting_group_size,
    groups_that_fit,
)

ACT_ORDER_FORMAT = "gptq"  # the only format that is written with act-order
MAX_IN_FLOAT = 0.1  # fraction of the weights in float above which smaller groups are chosen
EXCEPTIONS_FORMAT = "compressed-tensors"  # the format that every reader takes if linears differ


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Scheme of every linear; None: it stays in float, and `reasons` says why."""

    layout: Layout
    schemes: dict[str, Scheme | None]
    reasons: dict[str, str]
    padding: Padding | None = None
    kv_cache: str | None = None  # "int8" or "fp8": scales for such a KV cache are written too
    kv_per_head: bool = False  # each KV head has its own scales
    act_order: bool = False  # act-order: the solver decides which inputs form a group
    misfits: tuple[str, ...] = ()  # remarks on linears without whole groups

    @property
    def quantized(self) -> dict[str, Scheme]:
        return {name: scheme for name, scheme in self.schemes.items() if scheme is not None}

    @property
    def has_exceptions(self) -> bool:
        """Return True if linears differ, so that the config block must name some of them."""
        return len(set(self.schemes.values())) > 1

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return warnings about programs that will not load the result."""
        found = []
        if self.act_order and any(s.weight.group_size != CHANNEL for s in self.quantized.values()):
            found.append(
                "act-order is written: transformers, GPTQModel and SGLang load it and reorder the"
                " inputs on every call, which is slow; vLLM 0.33 refuses it"
            )
        if self.layout.name == "gptq" and self.has_exceptions:
            found.append(
                "transformers ignores the dynamic entries of a GPTQ block, which say what differs"
                " here, and will not load the folder: compressed-tensors loads there too"
            )
        return tuple(found)

    def config(self, quantizer: str) -> QuantConfig:
        """Return the config block's object."""
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
    unasked: Mapping[str, str] | None = None,
) -> Plan:
    """Decide for every linear of `shapes` ([N, K] by name).

    `kept`: other linears that always stay in float, and why. `unasked`: linears of `shapes` that
    stay in float unless an override matches them, and why. `ignore` and `overrides` hold patterns
    (see `fits`); ignored linears stay in float, and the first matching override wins. A linear
    whose shape does not fit stays in float, with all members of its fused matrix. Raises InputError
    if a pattern matches nothing, a scheme cannot be written, or nothing is left to quantize.

    Without an `output_format`, the scheme's default is used. It becomes compressed-tensors if
    linears differ and the default cannot store that or transformers cannot read it.
    """
    overrides = list(overrides)
    arguments = (
        *(shapes, scheme, ignore, overrides, padding, kv_cache, kv_per_head, act_order),
        *(kept or {}, unasked or {}),
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
    unasked: Mapping[str, str],
) -> Plan:
    """Make the plan in one layout."""
    check_holds_groups(layout, act_order)
    check_holds_kv_scales(layout, kv_cache)
    for each in (scheme, *(other for _, other in overrides)):
        check_writable(layout, each)
    for pattern in (*ignore, *(pattern for pattern, _ in overrides)):
        if not any(fits(pattern, name) for name in shapes):
            raise InputError(
                f"pattern {pattern!r}",
                "matches no linear",
                f"the linears have names such as {next(iter(shapes), '')}",
            )
    schemes: dict[str, Scheme | None] = {}
    reasons: dict[str, str] = {}
    for name, shape in shapes.items():
        shape = padding.shape(name, shape) if padding else shape
        wanted = next((other for pattern, other in overrides if fits(pattern, name)), scheme)
        if any(fits(pattern, name) for pattern in ignore):
            reason = "ignored"
        elif name in unasked and not fits_any(overrides, name):
            reason = unasked[name]
        else:
            reason = why_not(layout, wanted, *shape)
        schemes[name] = None if reason else wanted
        if reason:
            reasons[name] = reason
    schemes |= dict.fromkeys(kept)
    reasons |= kept
    misfits = _misfits(layout, shapes, reasons, scheme, padding)
    if layout.fused_alike:
        _agree_in_fused(schemes, reasons)
    plan = Plan(
        layout=layout,
        schemes=schemes,
        reasons=reasons,
        padding=padding,
        kv_cache=kv_cache,
        kv_per_head=kv_per_head,
        act_order=act_order,
        misfits=misfits,
    )
    if not plan.quantized:
        name, reason = next(iter(reasons.items()))
        raise SchemeError(
            name, reason, "; ".join(("no linear can be quantized like this", *misfits))
        )
    plan.config("")  # raises if the format cannot store differences between modules
    return plan


def _misfits(
    layout: Layout,
    shapes: Mapping[str, tuple[int, int]],
    reasons: Mapping[str, str],
    scheme: Scheme,
    padding: Padding | None,
) -> tuple[str, ...]:
    """Return warnings about linears that groups do not divide, and the groups that fit."""
    size = scheme.weight.group_size
    if layout.name in STAGED_LAYOUTS:  # types fall back to others
        return ()
    counts: Counter[int] = Counter()
    for name in reasons:
        if NO_WHOLE_GROUPS in reasons[name] and name in shapes:
            shape = padding.shape(name, shapes[name]) if padding else shapes[name]
            counts[shape[1]] += 1
    fitting = fitting_group_size(K for _, K in shapes.values())
    return tuple(
        f"{count} linears of {in_features} inputs have no whole groups of {size} and stay in float;"
        + (
            f" a group size of {fitting}, or {AUTO_GROUPS}, fits every linear"
            if fitting != CHANNEL
            else f" {groups_that_fit(in_features)}"
        )
        + f" (vLLM and SGLang take {', '.join(map(str, SERVED_GROUPS))} or {CHANNEL} of gptq, awq)"
        for in_features, count in counts.items()
    )


def fitted_scheme(
    scheme: Scheme,
    shapes: Mapping[str, tuple[int, int]],
    *,
    ignore: Sequence[str] = (),
    overrides: Iterable[tuple[str, Scheme]] = (),
) -> Scheme:
    """Return the scheme with the largest groups that fit every linear and servers' fast kernels.

    Ignored and overridden linears do not count. If no groups fit, each output has one scale. Raises
    SchemeError if the scheme's groups are fixed.
    """
    if str(scheme) in FIXED_SCHEMES | MICROSCALED:
        raise SchemeError(f"scheme {scheme}", "its scales are fixed", "leave `group_size` out")
    sizes = [K for _, K in _chosen(shapes, ignore, overrides)]
    return _with_groups(scheme, fitting_group_size(sizes))


def default_group_scheme(
    scheme: Scheme,
    shapes: Mapping[str, tuple[int, int]],
    *,
    ignore: Sequence[str] = (),
    overrides: Iterable[tuple[str, Scheme]] = (),
) -> Scheme:
    """Return the scheme for a user who states no group size.

    Its groups are smaller than the scheme's own if those would leave more than a tenth of the
    weights in float, and if smaller groups fit every linear. Ignored and overridden linears do not
    count.
    """
    size = scheme.weight.group_size
    if size < 1 or str(scheme) in FIXED_SCHEMES | MICROSCALED:
        return scheme
    chosen = _chosen(shapes, ignore, overrides)
    left = sum(N * K for N, K in chosen if K % size)
    fitting = fitting_group_size(K for _, K in chosen)
    if fitting == CHANNEL or left <= MAX_IN_FLOAT * sum(N * K for N, K in chosen):
        return scheme
    return _with_groups(scheme, fitting)


def _with_groups(scheme: Scheme, size: int) -> Scheme:
    return replace(scheme, weight=replace(scheme.weight, group_size=size))


def _chosen(
    shapes: Mapping[str, tuple[int, int]],
    ignore: Sequence[str],
    overrides: Iterable[tuple[str, Scheme]],
) -> list[tuple[int, int]]:
    """Return the shapes of the linears that are neither ignored nor overridden."""
    overrides = list(overrides)
    return [
        shape
        for name, shape in shapes.items()
        if not fits_any(overrides, name) and not any(fits(each, name) for each in ignore)
    ]


def fits(pattern: str, name: str) -> bool:
    """Return True if a user's pattern matches a linear's name.

    "re:..." is a regular expression from the start of the name. A text with * or ? is matched
    against the whole name. Any other text must occur in the name.
    """
    if pattern.startswith("re:"):
        return regex(pattern.removeprefix("re:")).matches(name)
    if "*" in pattern or "?" in pattern:
        return fnmatchcase(name, pattern)
    return pattern in name


def fits_any(overrides: Iterable[tuple[str, Scheme]], name: str) -> bool:
    """Return True if any of the patterns matches a linear's name."""
    return any(fits(pattern, name) for pattern, _ in overrides)


def parse_override(text: str) -> tuple[str, Scheme]:
    """Parse "PATTERN=SCHEME", the value of a flag. Raises InputError."""
    pattern, equals, scheme = text.rpartition("=")
    if not equals or not pattern:
        raise InputError(
            f"override {text!r}",
            "is not PATTERN=SCHEME",
            r"name the linears by an expression, such as '.*\.down_proj=w8a16-sym'",
        )
    return pattern, BLOCK_SCHEMES.get(scheme) or Scheme.parse(scheme)


def _agree_in_fused(schemes: dict[str, Scheme | None], reasons: dict[str, str]) -> None:
    """Give members of a fused matrix one scheme: float if one member must be."""
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
