"""The row of an architecture: one value of `general.architecture`. Needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from formats.architecture.family import Family
from formats.families import FAMILIES
from formats.gguf.architectures.parts import BEFORE


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Row of the table: one value of `general.architecture`."""

    name: str
    family: str  # architecture of the family's row
    norms: Mapping[str, str] = field(default_factory=lambda: BEFORE)
    # Rows of q and k are in the order of rotated pairs (2 i, 2 i + 1), not of halves.
    permuted: bool = False
    # config.json key -> metadata key below the architecture; left out where the file has none
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)  # keys with one value in all models
    # Layers with a sliding window: "all", or every n-th layer has none; 0: no layer has one.
    window: Literal["", "all", "pattern"] = ""
    pattern: int = 0  # the usual n; the file may state its own
    bias_keys: Mapping[str, str] = field(default_factory=dict)  # config.json key -> a layer's bias
    # Families of files with experts, or with a window, under the same name
    with_experts: str = ""
    with_window: str = ""
    with_sigmoid: str = ""  # experts are chosen by sigmoid
    also: tuple[str, ...] = ()  # families with the same layers, which are written so

    def family_of(self, *, has_experts: bool, has_window: bool, by_sigmoid: bool = False) -> Family:
        """Return the family's row for a file with experts, chosen by sigmoid, or a window."""
        name = (has_experts and self.with_experts) or (has_window and self.with_window)
        name = (by_sigmoid and self.with_sigmoid) or name
        return FAMILIES[name or self.family]

    @property
    def is_latent(self) -> bool:
        """Return True for latent attention."""
        return bool(FAMILIES[self.family].latent)
