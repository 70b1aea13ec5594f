"""Table of all model families, one row each: names, shapes, biases, norms and splits.

All four packages read it. The rows are in architecture/rows/. The model code of a served family is
in qserve/model/families/.
"""

from collections.abc import Mapping
from typing import Any

from formats.architecture.family import Family, architecture_of
from formats.architecture.rows.classics import CLASSICS
from formats.architecture.rows.dense import DENSE
from formats.architecture.rows.hybrids import HYBRIDS
from formats.architecture.rows.latent import LATENT
from formats.architecture.rows.mixtures import MIXTURES
from formats.architecture.rows.own_code import OWN_CODE_DENSE, OWN_CODE_MIXTURES

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        *(*DENSE, *CLASSICS, *OWN_CODE_DENSE),
        *(*MIXTURES, *OWN_CODE_MIXTURES, *LATENT, *HYBRIDS),
    )
}


def served_architectures() -> tuple[str, ...]:
    """Return the architectures that qserve serves."""
    return tuple(name for name, family in FAMILIES.items() if family.served)


def family_of(config: Mapping[str, Any]) -> Family | None:
    """Return the family of config.json's only architecture."""
    return FAMILIES.get(architecture_of(config) or "")


def known_family(config: Mapping[str, Any]) -> Family | None:
    """Return the family of config.json's model_type, or else of its only architecture."""
    return checked_family(config) or family_of(config)


def checked_family(config: Mapping[str, Any]) -> Family | None:
    """Return the family of config.json's model_type if its config rules are known."""
    for family in FAMILIES.values():
        if family.rules is not None and family.model_type == config.get("model_type"):
            return family
    return None
