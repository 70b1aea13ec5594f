"""The quantization block of config.json for a GGUF file, in the keys of compressed-tensors.

No GGUF file holds it. It is made from the types of the file's tensors, so that every reader here
finds the scheme of a module where it looks for it.
"""

from collections.abc import Mapping
from typing import Any

from formats.codecs import compressed_config

METHOD = "gguf"


def read(block: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a QuantConfig. Raises CheckpointError, naming the key."""
    if not block.get("config_groups"):  # no kernel takes any of the types
        return {"scheme": None, "rules": (), "layout": METHOD}
    return {**compressed_config.read(block), "layout": METHOD}


def write(block: Mapping[str, Any], types: Mapping[str, int]) -> dict[str, Any]:
    """Return the block, given that of compressed-tensors and how many linears have each type."""
    return {
        "quant_method": METHOD,
        "types": dict(types),
        "config_groups": block.get("config_groups", {}),
        "ignore": block.get("ignore", []),
    }
