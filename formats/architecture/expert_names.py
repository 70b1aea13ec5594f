"""Names that tools give to MoE experts, mapped to the names of the family's row.

A family's row has one name for each linear. Some tools write others: llm-compressor's files call
Mixtral's `w1`, `w3` and `w2` `gate_proj`, `up_proj` and `down_proj`, and transformers' modules call
`block_sparse_moe` `mlp`. The reader presents the row's names; configs may use any of them.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from formats.architecture.experts import Experts
from formats.architecture.sizes import num_experts
from formats.families import family_of

# Names of gate, up and down in an expert, and of the module that holds the experts.
LEAVES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
MODULES = ("mlp", "block_sparse_moe", "feed_forward")
STACKED = ("gate_up_proj", "down_proj")  # one tensor holds the matrices of all experts
_LAYER = r"(?P<layer>.*\.layers\.\d{1,9})\."
_MODULE = re.compile(rf"{_LAYER}(?P<module>{'|'.join(MODULES)})\.(?P<rest>.+)")
_EXPERT = re.compile(
    rf"{_LAYER}(?P<module>{'|'.join(MODULES)})\.experts\.(?P<number>\d{{1,9}})"
    rf"\.(?P<leaf>{'|'.join(leaf for row in LEAVES for leaf in row)})(?P<rest>\..+|$)"
)


class ExpertNames(NamedTuple):
    """Example of an expert whose name in the file differs from the family's name."""

    found: str  # for example block_sparse_moe.experts.0.gate_proj
    expected: str


def canonical_names(config: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
    """Map names in the file to names of the family's row; empty if they are the same."""
    experts = separate_experts(config)
    # no tool renames experts without a gate, or experts that are directly below the layer
    if experts is None or not (experts.gated and experts.module):
        return {}
    family = family_of(config)
    dense = {
        linear.name.rpartition(".")[2]: linear.name.rpartition(".")[0]
        for projection in (family.gate_up, family.down)
        for linear in projection.linears
    }
    renamed = {name: _canonical(experts, dense, name) for name in names}
    differ = any(name != own for name, own in renamed.items())
    # two names for one tensor: the file is damaged; keep its names for the error
    return renamed if differ and len(set(renamed.values())) == len(renamed) else {}


def renamed_experts(renamed: Mapping[str, str]) -> ExpertNames | None:
    """Return one example of a renamed expert; None: no expert was renamed."""
    for name, own in renamed.items():
        found, expected = _EXPERT.fullmatch(name), _EXPERT.fullmatch(own)
        if name != own and found and expected:
            return ExpertNames(_local(found), _local(expected))
    return None


def other_names(module: str) -> Iterator[str]:
    """Return the other names that configs may use for an expert's linear, or for its stack."""
    match = _EXPERT.fullmatch(module)
    if match is None or match["rest"]:
        return
    place = next(row.index(match["leaf"]) for row in LEAVES if match["leaf"] in row)
    for parent in MODULES:
        for row in LEAVES:
            name = f"{match['layer']}.{parent}.experts.{match['number']}.{row[place]}"
            if name != module:
                yield name
        yield f"{match['layer']}.{parent}.experts.{STACKED[place // 2]}"


def missing_experts(config: Mapping[str, Any], names: Collection[str]) -> tuple[str, str] | None:
    """Return (a missing linear of an expert, what the file has instead); None: none is missing.

    `names` are tensor names as `canonical_names` returns them.
    """
    family, count = family_of(config), num_experts(config)
    experts = separate_experts(config)
    layers = config.get("num_hidden_layers")
    if experts is None or not count or type(layers) is not int:
        return None
    modules = {name.rpartition(".")[0] for name in names}
    for layer in range(min(layers, 10_000)):
        prefix = family.layer.format(i=layer)
        if not experts.is_in(layer, config):
            continue
        for number in (0, count - 1):
            for projection in (experts.gate_up, experts.down):
                for linear in projection.expert(number).linears:
                    if f"{prefix}.{linear.name}" not in modules:
                        return f"{prefix}.{linear.name}", describe_found(prefix, names)
    return None


def describe_found(prefix: str, names: Collection[str]) -> str:
    """Describe the expert tensors of a layer for an error."""
    below = sorted(name.removeprefix(f"{prefix}.") for name in names if name.startswith(prefix))
    found = [name for name in below if ".experts." in name or "expert" in name]
    shapes = dict.fromkeys(re.sub(r"\.\d+\.", ".N.", name) for name in found)
    return ", ".join(list(shapes)[:6]) or "no tensors of experts"


def separate_experts(config: Mapping[str, Any]) -> Experts | None:
    """Return the experts of a family that stores one linear per expert, else None."""
    family = family_of(config)
    experts = None if family is None else family.variant(config).experts
    return None if experts is None or experts.fused else experts


def _leaves(experts: Experts) -> tuple[str, ...]:
    linears = (*experts.gate_up.linears, *experts.down.linears)
    return tuple(linear.name.rpartition(".")[2] for linear in linears)


def _canonical(experts: Experts, dense: Mapping[str, str], name: str) -> str:
    """Return the row's name of a tensor; names outside of experts are unchanged.

    `dense` maps the last name of a linear of a dense feed-forward to the linear's module.
    """
    match = _EXPERT.fullmatch(name)
    if match is not None:
        place = next(row.index(match["leaf"]) for row in LEAVES if match["leaf"] in row)
        leaf = _leaves(experts)[place]
        return f"{match['layer']}.{experts.module}.experts.{match['number']}.{leaf}{match['rest']}"
    match = _MODULE.fullmatch(name)
    if match is None:
        return name
    module = dense.get(match["rest"].partition(".")[0], experts.module)
    return f"{match['layer']}.{module}.{match['rest']}"


def _local(match: re.Match) -> str:
    return f"{match['module']}.experts.{match['number']}.{match['leaf']}"
