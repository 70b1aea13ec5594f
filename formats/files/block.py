"""The quantization block of config.json, for a model of a family."""

import re
from collections.abc import Mapping
from typing import Any

from formats.families import family_of
from formats.quant_config import QuantConfig


def quantization_block(quant: QuantConfig, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the block; `config`: the model's config.json."""
    block, family = quant.to_dict(), family_of(config)
    if family is not None and "ignore" in block:
        block["ignore"] = _under_both_names(block["ignore"], family.names_in_transformers)
    return block


def _under_both_names(ignored: list[str], names: Mapping[str, str]) -> list[str]:
    """Add the patterns of modules in float under transformers' names, which it compares.

    `names`: file's name of a module below a layer -> transformers' name.
    """
    found = list(ignored)
    for own, theirs in names.items():
        for entry in ignored:
            is_pattern = entry.startswith("re:")
            old, new = (re.escape(own), re.escape(theirs)) if is_pattern else (own, theirs)
            pattern = rf"(?<=\.){re.escape(old)}(?=$|[$.\\])"  # whole names only
            found.append(re.sub(pattern, lambda _, new=new: new, entry))
    return list(dict.fromkeys(found))
