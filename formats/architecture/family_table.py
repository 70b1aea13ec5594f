"""Table of the model families for users: `qserve families`, and the list in README.md."""

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import get_args

from formats.architecture.family import Family
from formats.architecture.states.mixer import Kind
from formats.architecture.text_part import WRAPPERS
from formats.families import FAMILIES

KINDS = (
    *("dense", "experts", "latent attention", "compressed attention"),
    *get_args(Kind),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyFacts:
    """Support for one architecture."""

    title: str
    architecture: str  # as config.json names it
    model_type: str
    kind: str  # one of KINDS
    served: bool
    # "any drafter", "any drafter and its MTP layer", or "ngram and suffix"
    speculation: str
    windows: str  # layers with sliding-window attention: "none", "all", "some"


def facts(family: Family) -> FamilyFacts:
    """Return what the project supports for a family."""
    has_layer = family.draft_layers_key or family.draft_names.layer
    drafters = "any drafter and its MTP layer" if has_layer else "any drafter"
    if family.merge_tensors:  # drafters on the device would read one of several streams
        drafters = "ngram and suffix"
    return FamilyFacts(
        title=family.title,
        architecture=family.architecture,
        model_type=family.model_type,
        kind=_kind(family),
        served=family.served,
        speculation=drafters,
        windows={"none": "none", "all": "all", "layer_types": "some"}[family.window],
    )


def _kind(family: Family) -> str:
    if family.state_mixer is not None:
        return family.state_mixer.kind
    if family.latent:
        return KINDS[2]
    if family.merge_tensors:
        return KINDS[3]
    return KINDS[1] if family.experts else KINDS[0]


def rows() -> list[dict[str, object]]:
    """Return the facts of all families as plain objects."""
    return [asdict(facts(family)) for family in FAMILIES.values()]


def to_text() -> str:
    """Return the table as text, one line per family."""
    lines = [("family", "architecture", "kind", "served", "speculation")]
    for each in map(facts, FAMILIES.values()):
        served = "yes" if each.served else "no"
        lines.append((each.title, each.architecture, each.kind, served, each.speculation))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
    return f"{table}\n\nText models inside these architectures are served, too:\n{_whole()}"


def _whole() -> str:
    """Return the architectures that contain the text model of a known family."""
    return textwrap.fill(", ".join(sorted(WRAPPERS)), width=120, break_on_hyphens=False)


def to_markdown() -> str:
    """Return the list of served families in qserve/docs/models.md: one item per kind."""
    items = ((kind, ", ".join(_titles(kind))) for kind in KINDS)
    return "\n".join(
        textwrap.fill(
            f"- {kind}: {titles}", width=120, subsequent_indent="  ", break_on_hyphens=False
        )
        for kind, titles in items
        if titles
    )


def _titles(kind: str) -> Iterator[str]:
    for each in map(facts, FAMILIES.values()):
        if each.kind == kind and each.served:
            yield each.title
