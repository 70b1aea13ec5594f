"""Staged folder that becomes a GGUF file: its quantization block and the tensors of its linears.

`quantize` makes it before it writes the file. K-quants are stored as the file's bytes, other types
as tensors of compressed-tensors.
"""

from collections.abc import Mapping
from typing import Any

import torch

from formats.codecs import compressed_tensors
from formats.codecs.config_fields import ConfigFields
from formats.errors import CheckpointError, tensor_error
from formats.gguf.schemes import BLOCK, BLOCK_SCHEMES, name_of
from formats.in_memory.k_weight import KWeight, is_in_blocks
from formats.in_memory.weights import Weight
from formats.rules import Rule, exact_patterns
from formats.scheme import Scheme

METHOD = "gguf-blocks"
BLOCKS = "weight_blocks"  # name of a K-quant's tensor, uint8 [N, row bytes]


def read(block: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a QuantConfig. Raises CheckpointError, naming the key."""
    try:
        scheme = BLOCK_SCHEMES[block["type"]]
        rules = tuple(
            Rule(kind="regex", text=text, scheme=name and BLOCK_SCHEMES[name])
            for text, name in block["modules"]
        )
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(METHOD, f"is damaged: {error!r:.60}", "quantize again") from None
    return {"scheme": scheme, "rules": rules, "layout": METHOD, "lm_head": False}


def write(config: ConfigFields) -> dict[str, Any]:
    """Return the block."""
    modules = [[rule.text, rule.scheme and name_of(rule.scheme)] for rule in config.rules]
    return {"quant_method": METHOD, "type": name_of(config.scheme), "modules": modules}


def rules_for(
    schemes: Mapping[str, Scheme | None], others: Mapping[str, Scheme | None]
) -> tuple[Rule, ...]:
    """Return rules for the modules whose scheme differs from most."""
    return tuple(
        Rule(kind="regex", text=text, scheme=scheme)
        for text, scheme in exact_patterns(schemes, others)
    )


def stored(scheme: Scheme) -> Scheme:
    """Return the scheme that is read back: the same."""
    return scheme


def encode(weight: Weight, name: str = "weight") -> dict[str, torch.Tensor]:
    """Return the tensors of one linear."""
    if isinstance(weight, KWeight):
        return {BLOCKS: weight.bytes_NX}
    return compressed_tensors.encode(weight, name)


def decode(tensors: dict[str, torch.Tensor], scheme: Scheme, name: str = "weight") -> Weight:
    """Decode one linear's tensors. Raises CheckpointError, with `name`, on a mismatch."""
    if not is_in_blocks(scheme.weight):
        return compressed_tensors.decode(tensors, scheme, name)
    if BLOCKS not in tensors:
        raise tensor_error(f"{name}.{BLOCKS}", "is missing")
    weight = KWeight(bytes_NX=tensors[BLOCKS], spec=scheme.weight)
    weight.check(name)
    return weight


def refuses(scheme: Scheme) -> str | None:
    """Return why a scheme is not a block type; None: it is one."""
    if scheme in BLOCK_SCHEMES.values():
        return None
    return f"holds {', '.join(BLOCK_SCHEMES)} only"


def refuses_shape(scheme: Scheme, out_features: int, in_features: int) -> str | None:
    """Return why blocks cannot hold a linear of this shape; None: they can."""
    if in_features % BLOCK:
        return f"its {in_features} inputs are not divisible by {BLOCK}"
    return None
