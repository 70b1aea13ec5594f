"""OnlineQuantization: rounds the linears of a float checkpoint to schemes while they load.

The class holds the settings --quantization and --quantization-config. torch and the table of
families are imported only by `plan`.
"""

import difflib
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from formats.errors import InputError, SchemeError
from formats.names import AUTO_GROUPS
from formats.scheme import (
    ALL,
    CHANNEL,
    DEFAULT_GROUP_SIZE,
    FIXED_SCHEMES,
    SCHEMES,
    ActivationSpec,
    QuantSpec,
    Scheme,
    fitting_group_size,
)
from formats.table import count_text

if TYPE_CHECKING:
    from formats.architecture.family import Family
    from formats.quant_config import QuantConfig

FLAG, CONFIG_FLAG = "--quantization", "--quantization-config"
ONLINE = "online"  # value of FLAG if CONFIG_FLAG has the schemes, as in vLLM
AUTO = f"-{AUTO_GROUPS}"  # suffix of a scheme: use the largest groups that fit every linear
EXPERTS = "*.experts.*"  # pattern that matches the linears of experts
HEAD = "lm_head"  # never quantized while loading; other servers' "ignore" lists often name it
# Short names, and other servers' names, of the schemes in formats/scheme.py
ALIASES: dict[str, Scheme] = {
    **{f"w{bits}a16": SCHEMES[f"w{bits}a16-sym"] for bits in (4, 8, 2, 3, 6)},
    "fp8": SCHEMES["w8a8-fp8"],
    "fp8_per_channel": SCHEMES["w8a8-fp8"],
    "fp8_per_block": SCHEMES["w8a8-fp8-block"],
    "fp8_per_tensor": Scheme(
        weight=QuantSpec(bits=8, symmetric=True, group_size=CHANNEL, rows=ALL, type="float"),
        activation=ActivationSpec(type="float"),
    ),
    "mxfp4": SCHEMES["w4a16-mxfp4"],
    "int8_per_channel_weight_only": Scheme.parse("w8a16-sym-channel"),
    "w8a8_int8": SCHEMES["w8a8"],
    "w8a8_fp8": SCHEMES["w8a8-fp8"],
}
# vLLM's schemes that are not supported -> the nearest supported scheme
NOT_HERE = {"mxfp8": "fp8_per_block", "nvfp4_per_token": "w4a16-nvfp4"}
# Names of checkpoint formats, which users may give although config.json says it -> quant_method
METHODS = {
    **{name: name for name in ("gptq", "awq", "compressed-tensors", "fp8", "mxfp4", "gguf")},
    **{name: name for name in ("auto-round", "quark", "bitsandbytes", "torchao", "hqq")},
    **{name: name for name in ("modelopt", "modelopt_fp4", "modelopt_mixed")},
    "gptq_marlin": "gptq",
    "awq_marlin": "awq",
}
KEYS = ("linear", "moe", "targets", "ignore")  # keys of CONFIG_FLAG, as in vLLM


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineQuantization:
    """Schemes of linears by name pattern. `plan` applies them to the linears of a model."""

    name: str  # as the user wrote it
    scheme: Scheme | None = None  # None: linears that no override matches stay in float
    # whether to enlarge groups until they fit; None: only if many weights would stay in float
    fit_groups: bool | None = False
    ignore: tuple[str, ...] = ()  # patterns, as in `qserve quantize --ignore`
    overrides: tuple[tuple[str, Scheme], ...] = ()  # the first pattern that matches counts
    method: str = ""  # quant_method of quantized checkpoints for which this name is accepted

    @classmethod
    def parse(cls, name: str, config: str | None = None) -> "OnlineQuantization":
        """Read the two settings. Raises InputError."""
        stated = {} if config is None else _parse_config(config)
        scheme, fit_groups = None, False
        if name == ONLINE:
            if stated.keys() <= {"ignore"}:
                raise InputError(
                    f"{FLAG} {name}",
                    f"requires {CONFIG_FLAG} with a scheme",
                    'such as {"linear": "fp8"}',
                )
            if "linear" in stated:
                scheme, fit_groups = _parse_scheme(stated["linear"])
        elif "linear" in stated:
            raise InputError(
                f"{CONFIG_FLAG} linear",
                f"{FLAG} {name} names another scheme",
                "give the scheme in one of them",
            )
        elif name in ALIASES or name not in METHODS:
            scheme, fit_groups = _parse_scheme(name)
        targets = dict(stated.get("targets", {}))
        if "moe" in stated:
            targets.setdefault(EXPERTS, stated["moe"])
        return cls(
            name=name,
            scheme=scheme,
            fit_groups=fit_groups,
            ignore=tuple(each for each in stated.get("ignore", ()) if each != HEAD),
            overrides=tuple((pattern, _parse_target(text)) for pattern, text in targets.items()),
            method=METHODS.get(name, ""),
        )

    def check_method(self, folder: str, stated: object) -> None:
        """Raise InputError unless the name is the quantization method of this checkpoint."""
        if not self.method or self.method != stated:
            raise InputError(
                f"{FLAG} {self.name}",
                f"{folder} is quantized already ({stated!s:.40})",
                f"remove {FLAG} to run it as it is, or start from the float model",
            )

    def plan(
        self, family: "Family", config: Mapping[str, Any], sizes: Mapping[str, Any], folder: str
    ) -> "RoundingPlan":
        """Choose the scheme of every linear of a float model. Raises InputError.

        `config` and `sizes`: `values` and `sizes` of the ModelConfig.
        """
        from formats.architecture.float_linears import kept_in_float, linear_shapes
        from formats.plan import default_group_scheme, fitted_scheme, make_plan

        if self.scheme is None and not self.overrides:
            raise InputError(
                f"{FLAG} {self.name}",
                f"names a kind of quantized checkpoint, and {folder} is not quantized",
                f"use a scheme, such as w4a16, w8a8 or fp8, or remove {FLAG}",
            )
        shapes = linear_shapes(family, config, sizes)
        unasked = kept_in_float(family, config)
        scheme, choice = self.scheme, {"ignore": self.ignore, "overrides": self.overrides}
        if scheme is None:
            unasked = dict.fromkeys(shapes, "no target matches it")
            scheme = self.overrides[0][1]
        elif self.fit_groups:
            scheme = fitted_scheme(scheme, shapes, **choice)
        elif self.fit_groups is None:
            scheme = default_group_scheme(scheme, shapes, **choice)
        self._check_groups({n: s for n, s in shapes.items() if n not in unasked}, scheme)
        plan = make_plan(shapes, scheme, unasked=unasked, **choice)
        return RoundingPlan(config=plan.config(""), schemes=plan.quantized, reasons=plan.reasons)

    def _check_groups(self, shapes: Mapping[str, tuple[int, int]], scheme: Scheme) -> None:
        """Raise InputError if groups do not fit a linear; `make_plan` would leave it in float."""
        from formats.plan import fits

        shapes = {n: s for n, s in shapes.items() if not any(fits(p, n) for p in self.ignore)}
        for name, (N, K) in shapes.items():
            wanted = next((each for pattern, each in self.overrides if fits(pattern, name)), scheme)
            try:
                wanted.weight.check_shape(name, N, K)
            except SchemeError as error:
                remedy = f'leave it in float: {CONFIG_FLAG} \'{{"ignore": ["{name}"]}}\''
                if wanted is scheme and str(scheme) not in FIXED_SCHEMES:
                    size = fitting_group_size(K for _, K in shapes.values())
                    groups = "one scale per output" if size == CHANNEL else f"groups of {size}"
                    remedy = f"use {_base_name(scheme)}{AUTO}, here {groups}"
                raise InputError(
                    f"{FLAG} {self.name}", f"{name}: {error.problem}", remedy
                ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingPlan:
    """The scheme of each linear of a float checkpoint that is rounded to nearest while it loads."""

    config: "QuantConfig"  # the quantization config of a checkpoint with these schemes
    schemes: Mapping[str, Scheme]  # full name of a linear -> scheme
    reasons: Mapping[str, str]  # full name of a linear that stays in float -> reason

    def to_text(self) -> str:
        """Return a text with the number of linears per scheme and per reason to stay in float."""
        counts = Counter(map(str, self.schemes.values()))
        kept = Counter(self.reasons.values())
        return "; ".join(
            [
                f"{count_text(count, 'linear')} rounded to {scheme}"
                for scheme, count in counts.items()
            ]
            + [f"{count} in float ({reason})" for reason, count in kept.items()]
        )


def _base_name(scheme: Scheme) -> str:
    """Return a scheme's name without its group size."""
    return str(replace(scheme, weight=replace(scheme.weight, group_size=DEFAULT_GROUP_SIZE)))


def _parse_scheme(text: str) -> tuple[Scheme, bool | None]:
    """Return the scheme for a name, and OnlineQuantization.fit_groups. Raises InputError."""
    subject, name = f"{FLAG} {text:.80}", text.removesuffix(AUTO)
    scheme = _find_scheme(name, subject)
    fit_groups = name != text
    if fit_groups and (_is_fixed(scheme) or name not in ALIASES | SCHEMES):
        raise InputError(subject, "its groups are fixed", f"use {name}")
    if _is_static(scheme):
        raise InputError(
            subject,
            "its activation scales come from calibration data",
            f"use {name.removesuffix('-static')}, or `qserve quantize` first",
        )
    states_no_groups = name in ALIASES | SCHEMES and not _is_fixed(scheme)
    return scheme, True if fit_groups else None if states_no_groups else False


def _find_scheme(name: str, subject: str) -> Scheme:
    if name in NOT_HERE:
        raise InputError(subject, "is not supported", f"use {NOT_HERE[name]}")
    base, groups = re.fullmatch(r"(.*?)(-g\d{1,9}|-channel)?", name, re.DOTALL).groups()
    if base in ALIASES:
        if groups is None:
            return ALIASES[base]
        base = str(ALIASES[base])
    if base not in SCHEMES:
        known = [*ALIASES, *(each for each, row in SCHEMES.items() if not _is_static(row))]
        near = difflib.get_close_matches(name, known, 1)
        remedy = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise InputError(subject, "unknown scheme", remedy)
    try:
        return Scheme.parse(base + (groups or ""))
    except SchemeError as error:
        raise InputError(subject, error.problem, error.remedy) from None


def _is_fixed(scheme: Scheme) -> bool:
    return scheme.weight.type != "int" or scheme == FIXED_SCHEMES["w8a8"]


def _is_static(scheme: Scheme) -> bool:
    return scheme.activation is not None and not scheme.activation.dynamic


def _parse_target(text: str) -> Scheme:
    """Return the scheme for the value of a pattern in `targets`. Raises InputError."""
    scheme, fit_groups = _parse_scheme(text)
    if fit_groups:
        raise InputError(
            f"{CONFIG_FLAG} {text}", "groups are fitted to the whole model only", "give a size"
        )
    return scheme


def _parse_config(text: str) -> dict[str, Any]:
    """Parse and check the JSON of CONFIG_FLAG. Raises InputError."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InputError(
            CONFIG_FLAG,
            f"expected a JSON object, found {text!r:.200}",
            f'for example {CONFIG_FLAG} \'{{"linear": "fp8"}}\'',
        )
    for key, value in found.items():
        if key not in KEYS:
            raise InputError(
                CONFIG_FLAG, f"has the unknown key {key!r:.40}", f"known: {', '.join(KEYS)}"
            )
        fits = {"ignore": _is_names, "targets": _is_targets}.get(key, _is_text)(value)
        if not fits:
            wanted = {"ignore": "a list of patterns", "targets": "an object of pattern: scheme"}
            raise InputError(
                f"{CONFIG_FLAG} {key}",
                f"expected {wanted.get(key, 'a scheme')}, found {json.dumps(value):.80}",
                "leave the key out, or write it in this form",
            )
    return found


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_targets(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))
