"""Rules of a config: the scheme of a module, by its name.

Servers fuse q, k and v into one matrix, and some configs name that matrix, so a module also matches
by the name of its fused matrix.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from formats.architecture.expert_names import other_names
from formats.architecture.family import Family
from formats.architecture.projection import Projection
from formats.errors import CheckpointError, block_error
from formats.families import FAMILIES
from formats.patterns import regex
from formats.scheme import Scheme

MAX_RULES = 20_000  # most rules of a config


def _of_state(family: Family) -> tuple[Projection, ...]:
    return () if family.state_mixer is None else family.state_mixer.readers


# Members that servers load as one matrix -> the name of that matrix.
FUSED: dict[tuple[str, ...], str] = {
    tuple(name.rpartition(".")[2] for name, _ in each.members): each.name.rpartition(".")[2]
    for family in FAMILIES.values()
    for each in (family.qkv, family.gate_up, *_of_state(family))
    # other servers fuse three of four (AFMoE's attention gates) and load one alone
    if 1 < len(each.members) < 4 and not (each.stored_fused or each.apart_elsewhere)
}
_FUSED_NAME = {member: name for members, name in FUSED.items() for member in members}
# Steps that all patterns of a config may take for one name (about 10 ms).
MAX_STEPS = 10_000
MAX_NAMES = 20_000
_PROBES = ("model.layers.10.self_attn.q_proj", "model.layers.10.mlp.down_proj")
LAYER_NUMBER = re.compile(r"\.(?:layers|h|blocks)\.(\d{1,9})\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Modules that `text` matches have `scheme`; None: they stay in float.

    "parts": the name has the parts of `text`, which dots separate, next to each other.
    """

    kind: Literal["regex", "name", "contains", "parts", "all"]
    text: str = ""
    scheme: Scheme | None

    def matches(self, module: str) -> bool:
        """Return True on a match. Raises CheckpointError if an untrusted pattern takes too long."""
        if self.kind == "regex":
            return regex(self.text).matches(module)
        if self.kind == "name":
            return self.text == module
        if self.kind == "parts":  # as the expression (.*\.)?TEXT(\..*)?$, which is far slower
            return f".{self.text}." in f".{module}."
        return self.kind == "all" or self.text in module


def float_modules(names: object, key: str) -> tuple[Rule, ...]:
    """Return rules for modules in float, by whole name, by suffix, or by parent module.

    Raises CheckpointError, with the key, unless they are a list of names.
    """
    names = names or []
    if (
        not isinstance(names, list)
        or len(names) > MAX_NAMES
        or not all(isinstance(name, str) and name for name in names)
    ):
        raise block_error(key, f"expected a list of names, found {names!r:.80}")
    return tuple(Rule(kind="parts", text=name, scheme=None) for name in names)


def natural_key(name: str) -> list[tuple[int, str]]:
    """Sort key: layers.2 before layers.10."""
    return [(len(part) if part.isdecimal() else 0, part) for part in name.split(".")]


def check_cost(rules: tuple[Rule, ...], subject: str) -> None:
    """Raise CheckpointError if untrusted patterns are invalid, or together take too long."""
    for probe in _PROBES:
        steps = 0
        for rule in rules:
            if rule.kind == "regex":
                steps += regex(rule.text).cost(probe)
            if steps <= MAX_STEPS:
                continue
            raise CheckpointError(subject, "its patterns take too long to match", "use fewer")


def fused_name(module: str) -> str:
    """Return the name of the fused matrix of `module`, or its own name if it has none."""
    parent, dot, local = module.rpartition(".")
    return parent + dot + _FUSED_NAME.get(local, local)


def first_match(rules: tuple[Rule, ...], module: str) -> Rule | None:
    """Return the first rule that matches a module, by its own name before the fused one.

    An expert's linear also matches by the names that other tools give it (expert_names.py).
    """
    names = (module, *other_names(module))
    for group in dict.fromkeys((names, tuple(fused_name(name) for name in names))):
        for rule in rules:
            if any(rule.matches(name) for name in group):
                return rule
    return None


def split_schemes(
    schemes: Mapping[str, Scheme | None],
) -> tuple[Scheme | None, dict[str, Scheme | None]]:
    """Return (the scheme of most modules, the modules with another scheme); None: all in float."""
    schemes = dict(sorted(schemes.items(), key=lambda item: natural_key(item[0])))
    counts = Counter(scheme for scheme in schemes.values() if scheme is not None)
    main = counts.most_common(1)[0][0] if counts else None
    return main, {name: scheme for name, scheme in schemes.items() if scheme != main}


def exact_patterns(
    schemes: Mapping[str, Scheme | None], chosen: Mapping[str, Scheme | None]
) -> list[tuple[str, Scheme | None]]:
    """Return regular expressions that match exactly the chosen modules of `schemes`.

    There is one expression per local name; the first match of a module counts. If all members of a
    fused matrix are chosen alike, the pattern includes the fused name too, because vLLM looks for
    it. Layers that stay in float as a whole share one pattern, the first: separate patterns for
    hundreds of experts would cost a reader too much time.
    """
    whole = _float_layers(schemes)
    if whole:
        of_whole = regex(whole).matches
        schemes = {name: scheme for name, scheme in schemes.items() if not of_whole(name)}
        chosen = {name: scheme for name, scheme in chosen.items() if not of_whole(name)}
    numbers: dict[tuple[str, Scheme | None], list[str]] = defaultdict(list)
    totals = Counter(_numberless(name) for name in schemes)
    for name, scheme in chosen.items():
        numbers[_numberless(name), scheme].append(name)
    texts: dict[tuple[str, Scheme | None], str] = {}
    for (local, scheme), names in numbers.items():
        number = r"\d+"
        if len(names) < totals[local]:
            number = "(?:" + "|".join(LAYER_NUMBER.search(name)[1] for name in names) + ")"
        if "#" not in local:
            number = ""
        texts[local, scheme] = number
    patterns: list[tuple[str, Scheme | None]] = [(whole, None)] if whole else []
    for (local, scheme), number in texts.items():
        parent, dot, leaf = local.rpartition(".")
        leaves = [leaf]
        for members, fused in FUSED.items():
            alike = [texts.get((parent + dot + member, scheme)) == number for member in members]
            if leaf in members and all(alike):
                leaves.append(fused)
        end = leaves[0] if len(leaves) == 1 else f"(?:{'|'.join(leaves)})"
        start = re.escape(parent + dot).replace(r"\#", number).replace("#", number)
        patterns.append((f"^{start}{end}$", scheme))
    return patterns


def _numberless(name: str) -> str:
    """Return a name with # for the layer's number."""
    return LAYER_NUMBER.sub(lambda found: found[0].replace(found[1], "#"), name)


def _float_layers(schemes: Mapping[str, Scheme | None]) -> str:
    """Return a regular expression for layers without quantized modules; empty: there are none."""
    # (prefix before the layer number, the number) -> all modules are float
    found: dict[tuple[str, str], bool] = {}
    for name, scheme in schemes.items():
        number = LAYER_NUMBER.search(name)
        if number is not None:
            layer = name[: number.start(1)], number[1]
            found[layer] = found.get(layer, True) and scheme is None
    starts: dict[str, list[str]] = defaultdict(list)
    for (start, number), is_float in found.items():
        if is_float:
            starts[start].append(number)
    texts = [rf"{re.escape(start)}(?:{'|'.join(numbers)})\." for start, numbers in starts.items()]
    return f"^(?:{'|'.join(texts)})" if len(texts) > 1 else f"^{texts[0]}" if texts else ""
