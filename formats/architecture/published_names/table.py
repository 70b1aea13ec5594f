"""Table of the multimodal models whose published names differ in more than a prefix."""

from collections.abc import Mapping
from typing import Any

from formats.architecture.family import architecture_of
from formats.architecture.published_names.cosmos3 import EDGE, OMNI, reasoner_entries
from formats.architecture.published_names.inkling import TEXT, WHOLE, inkling_entries

_ENTRIES = {
    **dict.fromkeys((*OMNI, EDGE), reasoner_entries),
    **dict.fromkeys((WHOLE, TEXT), inkling_entries),
}


def named_as_in_transformers(config: Mapping[str, Any], entries: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors under transformers' names; those of most models are unchanged."""
    convert = _ENTRIES.get(architecture_of(config) or "")
    return entries if convert is None else convert(entries)
